"""Files of a submitted job that somebody has changed: an error that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from kube_jobs import GPUS, LAUNCHERS, make_job

from shardwise.errors import ExitCode, UserError
from shardwise.platforms.known import find_launcher
from shardwise.platforms.launcher import write_files
from shardwise.platforms.submission import Submission, find_submission

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
contexts: [{name: main, context: {cluster: c, user: u}}]
current-context: main
"""


def note(folder: Path, platform: str, number: str) -> Submission:
    files = str(folder / "launch")
    return Submission(platform=platform, id=number, run_dir=str(folder), files_dir=files, time=0.0)


@pytest.mark.parametrize("number", ["", "1\0", "a\nb"])
def test_an_id_that_is_no_text_is_refused(number: str, tmp_path: Path) -> None:
    note(tmp_path, "slurm", number).save()
    with pytest.raises(UserError, match="does not say which job was submitted"):
        find_submission(tmp_path)


@pytest.mark.parametrize("number", ["12", "a.b", "1.2.3", "1.", f"{'9' * 5000}.1"])
def test_a_process_without_a_number_is_no_process(number: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not say which process") as refused:
        find_launcher("local").status(note(tmp_path, "local", number))
    assert refused.value.code == ExitCode.VERIFY_FAILED and "pgrep" in refused.value.fix


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("text", ["[", "", "a: 1", "null\n---\n1", "apiVersion: v9\nkind: What\n"])
def test_manifests_that_are_none_are_named(
    on: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    job = make_job(tmp_path, GPUS, f"runs_dir={tmp_path}", f"kubernetes.mount={tmp_path}")
    rendered = LAUNCHERS[on].render(job)
    write_files(rendered)
    rendered.main.path.write_text(text)
    submission = note(job.run_dir, on, "default/first")
    with pytest.raises(UserError, match="does not hold the files of this job any more") as refused:
        LAUNCHERS[on].exclude(submission, ["node-7"])
    assert "shardwise launch FILE" in refused.value.fix


@pytest.mark.parametrize("text", [None, b"\xff\xfe"])
def test_a_folder_of_files_that_is_none_is_named(text: bytes | None, tmp_path: Path) -> None:
    submission = note(tmp_path, "slurm", "17")
    if text is not None:
        (tmp_path / "launch").mkdir()
        (tmp_path / "launch" / "exclude").write_bytes(text)
    with pytest.raises(UserError, match="the files of job 17 cannot be changed"):
        find_launcher("slurm").exclude(submission, ["node-7"])
