"""Submit, watch, read and stop jobs through the real client of Kubernetes, against a server that
refuses what the real one would."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_api import KubeApi, serve
from kube_jobs import GPUS, LAUNCHERS, make_job

from shardwise.cli.main import main
from shardwise.errors import ExitCode, UserError
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes import client
from shardwise.platforms.kubernetes.kube_launchers import KubernetesLauncher
from shardwise.platforms.launcher import write_files
from shardwise.platforms.submission import Submission, find_submission, submission_of

pytestmark = pytest.mark.skipif(
    find_spec("kubernetes") is None, reason="`make setup` installs the client of Kubernetes"
)
ON = pytest.mark.parametrize("on", LAUNCHERS)
KINDS = {
    "trainjob": ["ConfigMap", "TrainingRuntime", "TrainJob"],
    "jobset": ["ConfigMap", "JobSet"],
    "volcano": ["ConfigMap", "Job"],
}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    monkeypatch.setattr(client, "_POLL_S", 0.0)
    with serve() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        monkeypatch.chdir(tmp_path)
        yield api


def submitted(on: str, folder: Path, *overrides: str) -> tuple[Job, Submission]:
    job = make_job(folder, GPUS, "runs_dir=runs", *overrides)
    rendered = LAUNCHERS[on].render(job)
    write_files(rendered)
    number = LAUNCHERS[on].submit(job, rendered)
    return job, submission_of(job, on, number, 0.0)


def labels(launcher: KubernetesLauncher, index: int) -> dict[str, str]:
    """As the controllers mark the pods of a job."""
    return {launcher.name_label: "first", launcher.index_label: str(index)}


@ON
def test_a_job_is_created_watched_and_stopped(on: str, api: KubeApi, tmp_path: Path) -> None:
    launcher = LAUNCHERS[on]
    job, submission = submitted(on, tmp_path)
    assert submission.id == "default/first" and api.kinds() == KINDS[on]
    creations = [path for method, path in api.asked if method == "POST"]
    assert len(creations) == len(KINDS[on])
    assert all("fieldValidation=Strict" in path for path in creations)

    assert launcher.status(submission).state == "waiting"
    message = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."
    refused = {"type": "PodScheduled", "status": "False", "reason": "x", "message": message}
    api.add_pod(labels(launcher, 1), None, conditions=[refused])
    first = api.add_pod(labels(launcher, 0), "node-a")
    api.add_pod({**labels(launcher, 0), launcher.name_label: "other"}, "node-z")
    found = launcher.status(submission)
    assert (found.state, found.nodes) == ("waiting", ("node-a",))
    assert "1 of 2 pods running" in found.words and message in found.words

    api.logs[first] = "step 1\nstep 2\n"
    waiting, running = launcher.logs(submission)[::-1]
    assert (running.name, running.text) == (f"pod {first} on node-a", "step 1\nstep 2\n")
    assert waiting.text == "" and "no node yet" in waiting.name

    launcher.stop(submission)
    found = launcher.status(submission)
    assert (found.state, found.words) == ("running", "stopping: 2 pods to end")
    api.pods.clear()
    # The last pod has ended, so the server forgets the job after this look at it.
    assert launcher.status(submission).state == "stopped"
    assert launcher.status(submission).words.startswith(f"no {launcher.kind.name} first is left")
    assert "ConfigMap" not in api.kinds()
    # To stop it once more is no error.
    launcher.stop(submission)
    assert job.name == "first"


@pytest.mark.parametrize("on", ["jobset", "trainjob"])
def test_an_elastic_job_runs_with_fewer_pods(on: str, api: KubeApi, tmp_path: Path) -> None:
    launcher = LAUNCHERS[on]
    _, submission = submitted(on, tmp_path, "launch.elastic=true")
    api.add_pod(labels(launcher, 0), "node-a")
    message = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."
    refused = {"type": "PodScheduled", "status": "False", "reason": "x", "message": message}
    api.add_pod(labels(launcher, 1), None, conditions=[refused])
    assert launcher.status(submission).state == "waiting"
    api.add_pod(labels(launcher, 2), "node-b")
    found = launcher.status(submission)
    assert (found.state, found.nodes) == ("running", ("node-a", "node-b"))
    assert "2 of 3 pods running" in found.words and message in found.words


def _condition(kind: str, message: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


@pytest.mark.parametrize(
    ("on", "status", "state", "words"),
    [
        ("jobset", _condition("Completed", "all done"), "ended", "Completed: all done"),
        ("jobset", _condition("Failed", "exit code 2"), "failed", "Failed: exit code 2"),
        ("jobset", _condition("Suspended", "in the queue"), "waiting", "Suspended: in the queue"),
        ("trainjob", _condition("Complete", ""), "ended", "Complete"),
        ("trainjob", _condition("Failed", "late"), "failed", "Failed: late"),
        ("volcano", {"state": {"phase": "Pending"}}, "waiting", "Pending"),
        ("volcano", {"state": {"phase": "Running"}}, "running", "Running"),
        ("volcano", {"state": {"phase": "Restarting"}}, "waiting", "Restarting"),
        ("volcano", {"state": {"phase": "Completed"}}, "ended", "Completed"),
        (
            "volcano",
            {"state": {"phase": "Terminated", "reason": "Exit2"}},
            "failed",
            "Terminated: Exit2",
        ),
        ("volcano", {"state": {"phase": "New"}}, "unknown", "New"),
    ],
)
def test_what_a_controller_says(
    on: str, status: dict[str, Any], state: str, words: str, api: KubeApi, tmp_path: Path
) -> None:
    _, submission = submitted(on, tmp_path)
    api.objects[LAUNCHERS[on].kind.name, "first"]["status"] = status
    found = LAUNCHERS[on].status(submission)
    assert (found.state, found.words) == (state, words)


def test_a_job_that_runs_is_not_replaced_and_one_that_ended_is(
    api: KubeApi, tmp_path: Path
) -> None:
    submitted("jobset", tmp_path)
    first = api.objects["JobSet", "first"]
    with pytest.raises(UserError, match="is there already: 0 of 0 pods running") as refused:
        submitted("jobset", tmp_path)
    assert refused.value.code == ExitCode.ENVIRONMENT
    assert api.objects["JobSet", "first"] is first
    first["status"] = _condition("Failed", "")
    submitted("jobset", tmp_path)
    assert api.objects["JobSet", "first"] is not first


@ON
def test_nodes_are_left_out_of_the_next_start(on: str, api: KubeApi, tmp_path: Path) -> None:
    _, submission = submitted(on, tmp_path, "launch.exclude=[node-z]")
    before = api.objects[LAUNCHERS[on].kind.name, "first"]
    LAUNCHERS[on].exclude(submission, ["node-a", "node-b"])
    assert api.objects[LAUNCHERS[on].kind.name, "first"] is not before
    file = Path(submission.files_dir, "manifest.yaml").read_text()
    assert list(yaml.safe_load_all(file))[-1]["metadata"]["name"] == "first"
    for text in (str(api.objects), str(list(yaml.safe_load_all(file)))):
        assert "'operator': 'NotIn', 'values': ['node-a', 'node-b', 'node-z']" in text
    assert api.kinds() == KINDS[on]


@ON
def test_an_older_version_refuses_what_it_would_drop(on: str, api: KubeApi, tmp_path: Path) -> None:
    """And nothing is left behind."""
    newest = {"trainjob": "trainer", "jobset": "restartStrategy", "volcano": "plugins"}[on]
    api.unknown_fields.add(newest)
    with pytest.raises(UserError, match="was refused") as refused:
        submitted(on, tmp_path)
    assert f'unknown field "{newest}"' in refused.value.why
    assert LAUNCHERS[on].kind.needs in refused.value.fix
    assert [kind for kind in api.kinds() if kind == "ConfigMap"] == []


def test_a_platform_that_is_not_installed_is_named(api: KubeApi, tmp_path: Path) -> None:
    api.missing.add("trainjobs")
    with pytest.raises(UserError, match="TrainJob default/first cannot be read") as refused:
        submitted("trainjob", tmp_path)
    assert "the cluster needs Kubeflow Trainer 2.2 or later" in refused.value.fix


def test_a_wrong_token_a_wrong_namespace_and_a_context(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, submission = submitted("jobset", tmp_path, "kubernetes.context=other")
    assert submission.id == "default/first@other"
    assert LAUNCHERS["jobset"].status(submission).state == "waiting"
    with pytest.raises(UserError, match="no context nowhere"):
        submitted("jobset", tmp_path, "kubernetes.context=nowhere")
    with pytest.raises(UserError) as refused:
        submitted("jobset", tmp_path, "kubernetes.namespace=elsewhere", "name=second")
    assert 'namespaces "elsewhere" not found' in refused.value.why
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path, token="wrong")))
    with pytest.raises(UserError) as refused:
        LAUNCHERS["jobset"].status(submission)
    assert "401" in refused.value.why and "kubectl auth can-i" in refused.value.fix


def test_no_server_and_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serve() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    with pytest.raises(UserError, match="API server does not answer"):
        submitted("jobset", tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no Kubernetes cluster is known here"):
        submitted("jobset", tmp_path)


def test_a_job_on_the_command_line(
    api: KubeApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "first.yaml").write_text(GPUS)

    def said(*words: str, expect: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["shardwise", *words])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        assert int(end.value.code or 0) == expect, output.err
        return output.err if expect else output.out

    launch = ("launch", "first.yaml", "--on", "jobset", "--submit", "runs_dir=runs")
    shown = said(*launch)
    assert "submitted: jobset job default/first" in shown and "config-map.yaml (" in shown
    # The reason stands above its setting in what is shown.
    lines = shown.splitlines()
    assert "A single pod is never replaced" in lines[lines.index("          backoffLimit: 0") - 1]
    found = find_submission(tmp_path / "runs" / "first")
    assert found is not None and found.platform == "jobset"
    # The same command does not start a second job in one run directory.
    again = said(*launch, expect=ExitCode.ENVIRONMENT)
    assert "was submitted before: jobset job default/first" in again

    pod = api.add_pod(labels(LAUNCHERS["jobset"], 0), "node-a")
    api.logs[pod] = "step 1/1000\nstep 2/1000\n"
    state = "first: running (jobset job default/first: 1 of 1 pod running) on node-a"
    assert said("status", "first").splitlines()[0] == state
    assert said("logs", "first", "--lines", "1") == "step 2/1000\n"
    assert "asked to stop" in said("stop", "first")
    api.pods.clear()
    said("status", "first")
    assert "there is nothing to stop: no JobSet first is left" in said("stop", "first")
    # The same command resumes, without a node that is bad.
    said(*launch)
    assert "starts next without node-a" in said("exclude", "first", "node-a")
    assert "'values': ['node-a']" in str(api.objects["JobSet", "first"])
