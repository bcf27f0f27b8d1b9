"""`shardwise launch` on the command line: files with reasons, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.config.load import load_config

RUN = "model: tiny-llama\ndata: {source: synthetic, seq_len: 32}\ncluster: 2xCPU\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(RUN)
    return "first.yaml"


def launch(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["shardwise", "launch", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    assert launch(monkeypatch, *words) in (2, 4)
    assert not list(Path.cwd().glob("**/launch"))
    return capsys.readouterr().err


def test_local_writes_a_script_with_a_reason_above_each_setting(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("launch.setup=[ulimit -c 0]", "launch.environment={A_NAME: it's}", "train.steps=7")
    assert launch(monkeypatch, config, *given) == 0
    said = capsys.readouterr()
    folder = tmp_path / "runs" / "first" / "launch"
    script = (folder / "run.sh").read_text()
    assert script in said.out and f"{folder / 'run.yaml'} (" in said.out
    lines = script.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("cd ", "export ", "exec ")):
            assert lines[number - 1].startswith("# "), line
    assert "export A_NAME='it'\"'\"'s'" in lines and "ulimit -c 0" in lines
    assert lines[-1].endswith(f"shardwise train {folder / 'run.yaml'}")
    assert (folder / "run.sh").stat().st_mode & 0o100
    read = load_config(folder / "run.yaml")
    assert (read.name, read.train.steps) == ("first", 7)
    assert read.runs_dir == str(tmp_path / "runs")
    assert "nothing is submitted" in said.err
    assert not (folder / "submission.json").exists()


def test_files_go_where_they_are_wanted(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(monkeypatch, config, "--on", "local", "--out", "files") == 0
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["run.sh", "run.yaml"]
    assert not (tmp_path / "runs").exists()


def test_a_platform_that_is_not_there_is_named_with_those_that_are(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, monkeypatch, config, "--on", "lsf")
    assert "--on lsf is no platform" in said and "write --on local" in said


def test_several_nodes_are_not_one_machine(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, monkeypatch, config, "cluster=2x2xCPU")
    assert "2x2xCPU has 2 nodes, and --on local is one machine" in said
    assert "cluster.name=2xCPU" in said


def test_settings_of_a_scheduler_are_not_ignored_on_one_machine(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("launch.options=[--partition=gpu]", "launch.grace_s=60")
    said = refused(capsys, monkeypatch, config, *given)
    assert "launch.options and launch.grace_s would have no effect" in said


def test_skypilot_prints_its_task_and_says_what_it_needs(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = (config, "--on", "skypilot", "cluster.name=2x8xH100")
    assert "fix: write skypilot.volume=NAME" in refused(capsys, monkeypatch, *on)
    assert launch(monkeypatch, *on, "skypilot.volume=training") == 0
    folder = tmp_path / "runs" / "first" / "launch"
    assert (folder / "task.yaml").read_text() in capsys.readouterr().out
    assert load_config(folder / "run.yaml").runs_dir == "/shared/runs"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(monkeypatch, *on, "skypilot.volume=training", "--submit") == 4
    assert "fix: pip install 'skypilot[kubernetes]>=0.14'" in capsys.readouterr().err
