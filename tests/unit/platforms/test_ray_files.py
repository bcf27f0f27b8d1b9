"""What is written for Ray, what its client is asked, and how nodes and the driver end.

tests/chaos/test_ray.py does it on a real cluster.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kube_jobs import CPUS, GPUS, make_job

from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.launch.ray_node import _placed, _run_agent, _with_setup
from shardwise.launch.ray_trainer import Desk, RayJob
from shardwise.platforms.job import Job
from shardwise.platforms.launcher import write_files
from shardwise.platforms.ray import RayLauncher
from shardwise.platforms.submission import Submission, submission_of

RAY = RayLauncher()
# Ray has no time limit of its own.
ON_RAY = GPUS.replace("walltime_s: 86400, ", "")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    return make_job(tmp_path, ON_RAY, "runs_dir=runs")


def test_the_driver_reads_what_was_written(job: Job) -> None:
    rendered = RAY.render(job)
    write_files(rendered)
    read = RayJob.load(rendered.main.path)
    assert (read.num_workers, read.ranks_per_node) == (4, 8)
    assert read.resources_per_node == {"GPU": 8, "CPU": 8}
    # Ray's own defaults are one node for as many as fit, and no restart.
    assert (read.placement_strategy, read.max_failures) == ("STRICT_SPREAD", 3)
    assert read.command == [
        "/bin/shardwise",
        "torchrun",
        "--shutdown-timeout=240",
        str(job.config_path),
    ]
    assert read.environment["PYTHONUNBUFFERED"] == "1"
    assert rendered.files[1].path == job.config_path


def test_an_elastic_job_takes_the_nodes_that_there_are(tmp_path: Path) -> None:
    """The global batch is written down, so that each start trains the same one."""
    rendered = RAY.render(make_job(tmp_path, ON_RAY, "launch.elastic=true", f"runs_dir={tmp_path}"))
    write_files(rendered)
    assert RayJob.load(rendered.main.path).num_workers == (2, 4)
    assert load_config(str(rendered.files[1].path)).train.global_batch != "auto"


def test_each_setting_has_a_reason(job: Job) -> None:
    settings = RAY.render(job).main.settings
    wanted = {"nodes", "resources_per_node.GPU", "placement_strategy", "max_failures", "command"}
    assert wanted <= {one.name for one in settings if one.why}
    lines = RAY.render(job).main.text.splitlines()
    assert lines[lines.index("max_failures: 3") - 1].startswith("# ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.options=[--partition=gpu]", "launch.options would have no effect"),
        ("launch.exclude=[a]", "launch.exclude would have no effect"),
        ("launch.walltime_s=60", "launch.walltime_s would have no effect"),
    ],
)
def test_what_ray_has_no_use_for_is_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        RAY.render(make_job(tmp_path, ON_RAY, override))


def test_this_machine_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the machine that this command runs on"):
        RAY.render(make_job(tmp_path, CPUS, "cluster.name=local"))


@pytest.mark.parametrize("text", ["", "name: a\n", "[", "name: a\nwhat: 1\n"])
def test_a_file_that_is_no_job_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ray.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="is no file of `shardwise launch --on ray`"):
        RayJob.load(path)


class FakeClient:
    """The methods of Ray's JobSubmissionClient that are called."""

    jobs: dict[str, Any]

    def submit_job(self, *, entrypoint: str, submission_id: str) -> str:
        self.jobs[submission_id] = SimpleNamespace(
            status=SimpleNamespace(value="PENDING"), message="", entrypoint=entrypoint
        )
        return submission_id

    def get_job_info(self, number: str) -> Any:
        if number not in self.jobs:
            raise RuntimeError(f"Job {number} does not exist")
        return self.jobs[number]

    def get_job_logs(self, number: str) -> str:
        return f"log of {number}"

    def stop_job(self, number: str) -> bool:
        self.jobs[number].status.value = "STOPPED"
        return True


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    module = ModuleType("ray.job_submission")
    module.JobSubmissionClient = type("Client", (FakeClient,), {"jobs": jobs})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.job_submission", module)
    return jobs


def submitted(job: Job) -> Submission:
    return submission_of(job, "ray", RAY.submit(job, RAY.render(job)), 0.0)


def test_a_job_is_submitted_watched_and_stopped(job: Job, jobs: dict[str, Any]) -> None:
    submission = submitted(job)
    driver = f"/bin/shardwise ray-driver {job.files_dir / 'ray.yaml'}"
    assert jobs[submission.id].entrypoint == driver
    assert RAY.status(submission).state == "waiting"
    jobs[submission.id].status.value = "RUNNING"
    assert RAY.status(submission).state == "running"
    assert RAY.logs(submission)[0].text == f"log of {submission.id}"
    RAY.stop(submission)
    # Ray would kill the driver after three seconds, in which nothing is saved.
    assert jobs[submission.id].status.value == "RUNNING"
    assert [one.entrypoint for one in jobs.values()][1:] == [f"{driver} --stop"]
    for word, message, state in (
        ("SUCCEEDED", "", "ended"),
        ("FAILED", "exit code 2", "failed"),
        ("FAILED", "Job entrypoint command failed with exit code 75", "stopped"),
        ("STOPPED", "", "stopped"),
    ):
        jobs[submission.id].status.value, jobs[submission.id].message = word, message
        assert RAY.status(submission).state == state


def test_a_job_that_waits_is_cancelled_and_one_that_is_gone_is_named(
    job: Job, jobs: dict[str, Any]
) -> None:
    submission = submitted(job)
    RAY.stop(submission)
    assert len(jobs) == 1 and RAY.status(submission).state == "stopped"
    with pytest.raises(UserError, match="no Ray cluster answers") as refused:
        RAY.status(replace(submission, id="none"))
    assert "Job none does not exist" in refused.value.why
    with pytest.raises(UserError, match="cannot be left out"):
        RAY.exclude(submission, ["a"])


def test_without_ray_the_error_says_what_to_install(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(UserError, match="Ray is not installed") as refused:
        submitted(job)
    assert "shardwise[ray]" in refused.value.fix


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [
        ([0, 0], None),
        ([0, 6], None),
        ([137, 4], None),
        ([75, 75], 75),
        ([6, 75], 75),
        ([6, 2], 2),
        ([75, 3], 3),
    ],
)
def test_a_start_is_judged_by_the_codes_of_all_nodes(codes: list[int], verdict: int | None) -> None:
    """A restart may help after a crash; not after an error in the settings, on whatever node."""
    desk = Desk()
    for node, code in enumerate(codes):
        desk.note(node, code)
    assert desk.verdict() == verdict
    desk.begin()
    assert desk.verdict() is None


def test_the_options_of_a_start_come_after_the_command() -> None:
    command = ["apptainer", "exec", "a.sif", "shardwise", "torchrun", "--x", "run.yaml"]
    words = _placed(command, ["--node-rank=1"])
    assert words == [*command[:5], "--node-rank=1", "--x", "run.yaml"]
    assert _with_setup([], words) == words
    shell = _with_setup(["module load cuda"], words)
    assert shell[2].splitlines()[-1] == 'exec "$@"' and shell[4:] == words


def test_a_request_to_stop_becomes_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the variables of Ray's workers do not reach the agent."""
    monkeypatch.setattr("shardwise.launch.ray_node._POLL_S", 0.02)
    ready = tmp_path / "ready"
    script = (
        "test -z $RANK$WORLD_SIZE || exit 9; trap 'exit 75' TERM; touch ready; "
        "while :; do sleep 0.05; done"
    )
    environ = dict(os.environ) | {"RANK": "1", "WORLD_SIZE": "2"}
    code = _run_agent(["/bin/sh", "-c", script], environ, str(tmp_path), ready.exists)
    assert code == ExitCode.PREEMPTED
    killed = _run_agent(["/bin/sh", "-c", "kill -9 $$"], environ, str(tmp_path), lambda: False)
    assert killed == 128 + signal.SIGKILL
