"""`shardwise status`, `logs`, `attach`, `stop` and `exclude` on what a run has left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.platforms.submission import Submission
from shardwise.training.heartbeat import birth_of

LATE = {"rank": 1, "behind_s": 0.25}


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["shardwise", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """What stands for the launcher of a run."""
    found = subprocess.Popen(["sleep", "600"])
    yield found
    found.kill()
    found.wait(60)


@pytest.fixture
def run_dir(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A submitted run of two ranks in which the second one is late."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo"
    logs = folder / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    for rank in range(2):
        text = f"2026-11-18T16:00:0{rank} rank {rank} of 2 on node{rank}, process 1\nwords {rank}\n"
        (logs / f"rank-{rank}.log").write_text(text)
    now = time.time()
    events = [{"event": "start", "time": now, "step": 0, "world_size": 2}]
    for step in (10, 20, 30):
        figures = {"num_steps": 100, "step_s": 2.0}
        events.append({"event": "step", "time": now, "step": step, **figures})
        straggler = LATE if step > 10 else None
        events.append({"event": "collectives", "time": now, "step": step, "straggler": straggler})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    Submission(
        platform="local",
        id=f"{process.pid}.{birth_of(process.pid)}",
        run_dir=str(folder),
        files_dir=str(folder / "launch"),
        time=now,
    ).save()
    return folder


def test_status_has_state_step_eta_and_the_late_node(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "status", "demo") == 0
    said = capsys.readouterr().out
    assert "demo: running (local job " in said
    assert "step 30 of 100 (30.0%), eta 2m20s; its last event was" in said
    late = "the others wait up to 250 ms per step for rank 1 on node1, since step 20"
    assert late in said
    assert command(monkeypatch, "status", str(run_dir), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["eta_s"]) == ("running", 30, 140.0)
    late = {"rank": 1, "node": "node1", "since_step": 20, "behind_s": 0.25, "reports": 2}
    assert found["late"] == late


def test_stop_sends_sigterm_to_the_launcher_and_status_sees_its_end(
    run_dir: Path,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "stop", "demo") == 0
    assert f"asked to stop: process {process.pid}" in capsys.readouterr().out
    assert process.wait(60) == -signal.SIGTERM
    assert command(monkeypatch, "status", "demo") == 0
    said = capsys.readouterr().out
    assert f"demo: ended (local job {process.pid}" in said and "eta" not in said
    assert "it has left no word of its end" in said
    assert command(monkeypatch, "stop", "demo") == 0
    assert "there is nothing to stop" in capsys.readouterr().out
    # The lines are there for as long as the directory is; attach returns at once.
    assert command(monkeypatch, "attach", "demo") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "16:00:01 [1 node1] words 1"
    assert "the job has ended" in said.err


def test_logs_are_the_last_lines_of_all_ranks(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "logs", "demo", "--lines", "3") == 0
    ranks = [line.split("[")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ranks == ["0", "1", "1"]


def test_logs_are_the_platforms_before_a_rank_has_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run_dir.glob("logs/attempt-1/*"):
        file.unlink()
    (run_dir / "logs" / "attempt-1").rmdir()
    (run_dir / "launch" / "output.log").write_text("importing\n")
    assert command(monkeypatch, "logs", "demo") == 0
    assert capsys.readouterr().out == "importing\n"


def test_a_run_that_nobody_submitted_is_known_by_its_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "launch" / "submission.json").unlink()
    assert command(monkeypatch, "status", "demo") == 0
    assert "demo: ended (no process holds the run directory)" in capsys.readouterr().out
    assert command(monkeypatch, "exclude", "demo", "node7") == 2
    assert "was not submitted by `shardwise launch`" in capsys.readouterr().err


def test_one_machine_has_no_node_to_leave_out(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "exclude", "demo", "node7") == 2
    assert "node7 cannot be left out of a run on one machine" in capsys.readouterr().err


def test_a_node_that_is_late_again_and_again_is_left_out(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "exclude", "demo") == 2
    assert "no node is named" in capsys.readouterr().err
    assert command(monkeypatch, "exclude", "demo", "--late") == 0
    assert capsys.readouterr().out == "no node is late\n", "two reports may be chance"
    with (run_dir / "events.jsonl").open("a") as file:
        event = {"event": "collectives", "time": time.time(), "step": 40, "straggler": LATE}
        file.write(json.dumps(event) + "\n")
    # This machine has no other node, and says which one it was asked for.
    assert command(monkeypatch, "exclude", "demo", "--late") == 2
    assert "node1 cannot be left out of a run on one machine" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("status", "logs", "attach", "stop"):
        assert command(monkeypatch, verb, "dome") == 2
        assert "there is no run dome" in capsys.readouterr().err
    assert os.getcwd() == str(run_dir.parents[1])
