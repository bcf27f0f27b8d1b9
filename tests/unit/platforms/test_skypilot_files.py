"""What is written for SkyPilot, what its script does on each node, and what `sky` is asked.

tests/chaos/test_skypilot.py runs the same script with real ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_jobs import CPUS, make_job

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.platforms.job import Job
from shardwise.platforms.launcher import write_files
from shardwise.platforms.sky_launcher import SkyPilotLauncher
from shardwise.platforms.submission import Submission, submission_of

SKY = SkyPilotLauncher()
GOLDEN = Path(__file__).with_name("golden") / "tasks" / "skypilot.yaml"
ON_SKY = """
model: llama-3.1-8b
data: {source: synthetic, seq_len: 4096}
cluster: 4x8xA100-40GB
runs_dir: /shared/runs
launch: {grace_s: 240, setup: [. /opt/env/bin/activate]}
skypilot:
  volume: training
  infra: k8s
  setup: [pip install /shared/shardwise]
  file_mounts: {/data: "s3://bucket/data"}
"""
ON_CPUS = CPUS.replace("2xCPU", "2x1xCPU") + "skypilot: {volume: training}\n"
EVERYTHING = (
    "skypilot.spot=true",
    "skypilot.image=docker:registry.example.com/shardwise:1",
    "skypilot.secrets=[HF_TOKEN]",
    "skypilot.accelerator=H100-MEGA",
    "launch.environment={A: it's $B}",
)
TIMEOUT_S = 120


def task_of(job: Job) -> dict[str, Any]:
    return dict(yaml.safe_load(SKY.render(job).main.text))


def test_the_text_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SKY.render(make_job(tmp_path, ON_SKY)).main.text
    if os.environ.get("SHARDWISE_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert yaml.safe_load(text)["resources"]["accelerators"] == {"A100": 8}


@pytest.mark.parametrize(
    ("text", "overrides"), [(ON_SKY, ()), (ON_SKY, EVERYTHING), (ON_CPUS, ("runs_dir=runs",))]
)
def test_skypilots_own_parser_takes_the_task(
    text: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    monkeypatch.chdir(tmp_path)
    rendered = SKY.render(make_job(tmp_path, text, *overrides))
    write_files(rendered)
    task = sky.Task.from_yaml_config(yaml.safe_load(rendered.main.text))
    assert task.num_nodes == rendered_nodes(rendered.main.text)
    (resources,) = task.resources
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    assert [hook["events"] for hook in resources.hooks] == [["preemption", "down"]]


def rendered_nodes(text: str) -> int:
    return int(yaml.safe_load(text)["num_nodes"])


def test_nodes_read_the_same_run_on_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = make_job(tmp_path, ON_SKY, "runs_dir=runs", "train.steps=7")
    rendered = SKY.render(job)
    write_files(rendered)
    task = yaml.safe_load(rendered.main.text)
    assert task["file_mounts"]["~/.shardwise/first.yaml"] == str(job.config_path)
    read = load_config(str(job.config_path))
    assert (read.name, read.runs_dir, read.train.steps) == ("first", "/shared/runs", 7)
    with pytest.raises(UserError, match="is not on the shared volume"):
        SKY.render(make_job(tmp_path, ON_SKY, "runs_dir=/elsewhere"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launch.options=[--partition=gpu]", "launch.options would have no effect"),
        ("launch.exclude=[a]", "launch.exclude would have no effect"),
        ("launch.walltime_s=60", "launch.walltime_s would have no effect"),
        ("launch.elastic=true", "launch.elastic would have no effect"),
        ("cluster.name=local", "is the machine that this command runs on"),
    ],
)
def test_what_skypilot_has_no_use_for_is_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        SKY.render(make_job(tmp_path, ON_CPUS, override))


def test_a_run_directory_that_is_lost_with_its_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"skypilot\.volume is not set") as refused:
        SKY.render(make_job(tmp_path, CPUS))
    assert "renamed in one step" in refused.value.why


# The agent writes down what it was given, and ends as the file `code` says, or when it is told.
AGENT = """#!/bin/sh
echo "$PET_NODE_RANK $*" >> {folder}/said
trap 'exit 75' USR2
[ -e {folder}/code ] && exit "$(cat {folder}/code)"
touch {folder}/waiting
while :; do /bin/sleep 0.05; done
"""


class Nodes:
    """The script of a task as SkyPilot runs it, with a stand-in for the agent."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.task = folder, task_of(job)
        for name in ("bin", ".shardwise"):
            (folder / name).mkdir()
        self.program("shardwise", AGENT.format(folder=folder))
        # Nobody waits for the last words of a first node that has none.
        self.program("sleep", "#!/bin/sh\nexec /bin/sleep 0.05\n")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, rank: int = 0, number: int = 1, script: str = "") -> subprocess.Popen[str]:
        environ = {
            "HOME": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": "sky-managed-2026_first_1-0",
            "SKYPILOT_INTERNAL_JOB_ID": str(number),
        }
        words = ["bash", "-c", script or self.task["run"]]
        return subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)

    def end_with(self, code: int, rank: int = 0, number: int = 1) -> int:
        (self.folder / "code").write_text(str(code))
        node = self.start(rank, number)
        node.communicate(timeout=TIMEOUT_S)
        return node.returncode

    def said(self) -> list[dict[str, str]]:
        """The number of the node and the options of each agent that was started."""
        found = []
        for line in (self.folder / "said").read_text().splitlines():
            rank, _, *words = line.split()
            options = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
            found.append({"rank": rank, "config": words[-1], **options})
        return found


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.chdir(tmp_path)
    where = (f"skypilot.mount={tmp_path}", "runs_dir=runs", "launch.max_requeues=1")
    return Nodes(tmp_path, make_job(tmp_path, ON_CPUS, *where))


def test_all_nodes_of_a_start_meet_and_no_other(nodes: Nodes) -> None:
    for rank, number in ((0, 1), (1, 1), (0, 2)):
        assert nodes.end_with(0, rank, number) == 0
    first, second, later = nodes.said()
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert (first["--local-addr"], second["--local-addr"]) == ("10.0.0.1", "10.0.0.2")
    assert first["--nnodes"] == "2" and first["--nproc-per-node"] == "1"
    assert first["config"] == f"{nodes.folder}/.shardwise/first.yaml"
    for name in ("--rdzv-id", "--rdzv-endpoint"):
        assert first[name] == second[name] != later[name]
    host, _, port = first["--rdzv-endpoint"].partition(":")
    assert host == "10.0.0.1" and 20000 <= int(port) < 30000


def test_another_start_is_asked_for_where_it_helps(nodes: Nodes) -> None:
    """75 is the code that SkyPilot recovers from; one failure is allowed here."""
    for final in (2, 3, 5, 7):
        assert nodes.end_with(final) == final
    # Both nodes of one start are one failure.
    assert nodes.end_with(6, rank=0) == 75
    assert nodes.end_with(137, rank=1) == 75
    assert nodes.end_with(6, number=2) == 6
    # A stop that has saved is no failure, and those before it are forgotten.
    assert nodes.end_with(75, number=3) == 75
    assert nodes.end_with(6, number=4) == 75


@pytest.mark.parametrize("by", ["hook", "signal"])
def test_a_request_to_stop_reaches_the_agent(nodes: Nodes, by: str) -> None:
    node = nodes.start()
    deadline = time.monotonic() + TIMEOUT_S
    agents = nodes.folder / ".shardwise"
    while not ((nodes.folder / "waiting").exists() and list(agents.iterdir())):
        assert node.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if by == "hook":
        (hook,) = nodes.task["config"]["hooks"]
        asking = nodes.start(script=hook["run"])
        asking.communicate(timeout=TIMEOUT_S)
        assert asking.returncode == 0
    else:
        node.send_signal(signal.SIGTERM)
    node.communicate(timeout=TIMEOUT_S)
    assert node.returncode == 75 and not list(agents.iterdir())


def test_nodes_without_a_volume_or_without_shardwise_say_so(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        ["bash", "-c", nodes.task["setup"]], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 4 and "no volume is mounted at" in done.stderr
    (nodes.folder / "bin" / "shardwise").unlink()
    # An active environment has one too.
    folders = [one for one in os.environ["PATH"].split(":") if not Path(one, "shardwise").exists()]
    monkeypatch.setenv("PATH", ":".join(folders))
    node = nodes.start()
    _, said = node.communicate(timeout=TIMEOUT_S)
    assert node.returncode == 4 and "the nodes have no shardwise" in said


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `sky` that notes what it is asked, and answers from a file."""
    folder = tmp_path / "sky"
    folder.mkdir()
    program = folder / "sky"
    program.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\ncat {folder}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def submitted(folder: Path, *overrides: str) -> Submission:
    job = make_job(folder, ON_SKY, *overrides)
    return submission_of(job, "skypilot", SKY.submit(job, SKY.render(job)), 0.0)


def test_a_job_is_submitted_watched_and_stopped(sky: Path) -> None:
    (sky / "answer").write_text("📋 Useful Commands\nManaged Job ID: \x1b[1m17\x1b[0m\n├── ...\n")
    submission = submitted(sky, "skypilot.secrets=[HF_TOKEN]", "runs_dir=runs")
    asked = (sky / "asked").read_text()
    assert submission.id == "17"
    assert asked.startswith("jobs launch --yes --detach-run --secret HF_TOKEN ")
    assert asked.endswith("runs/first/launch/task.yaml\n")
    for word, state in (
        ("PENDING", "waiting"),
        ("RECOVERING", "running"),
        ("SUCCEEDED", "ended"),
        ("CANCELLED", "stopped"),
        ("FAILED_SETUP", "failed"),
    ):
        record = {"job_id": 17, "status": word, "recovery_count": 2, "failure_reason": None}
        answer = json.dumps([{"job_id": 1, "status": "FAILED"}, record], indent=2)
        (sky / "answer").write_text(f"Fetching managed jobs...\n{answer}\n")
        found = SKY.status(submission)
        assert (found.state, found.words) == (state, f"{word}; recovered 2 times")
    (sky / "answer").write_text("[]")
    assert SKY.status(submission).state == "unknown"
    (sky / "answer").write_text("step 1")
    assert SKY.logs(submission)[0].text == "step 1"
    SKY.stop(submission)
    assert (sky / "asked").read_text().splitlines()[-2:] == [
        "jobs logs --no-follow --tail=1000 17",
        "jobs cancel --yes 17",
    ]
    with pytest.raises(UserError, match="cannot be left out"):
        SKY.exclude(submission, ["a"])


def test_answers_that_cannot_be_read_are_shown(sky: Path) -> None:
    (sky / "answer").write_text("nothing useful\n")
    with pytest.raises(UserError, match="does not say which job") as refused:
        submitted(sky, "runs_dir=runs")
    assert refused.value.why == "nothing useful"
    (sky / "answer").write_text("Managed Job ID: 3\n")
    submission = submitted(sky, "runs_dir=runs")
    with pytest.raises(UserError, match="does not print a list of jobs"):
        SKY.status(submission)


def test_without_sky_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="sky is not installed") as refused:
        submitted(tmp_path, "runs_dir=runs")
    assert "pip install 'skypilot[kubernetes]" in refused.value.fix
