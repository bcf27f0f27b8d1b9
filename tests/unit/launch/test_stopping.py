"""Real processes that play ranks: watched through their signs, stopped, asked, aborted, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import stopping
from shardwise.launch.hang import Hang
from shardwise.launch.lookout import Lookout
from shardwise.launch.relay import SignalRelay
from shardwise.launch.stopping import stop_ranks
from shardwise.launch.watchdog import Watchdog
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE

RANK = """
import os, signal, sys, time
from shardwise.training.heartbeat import Heartbeat, Phase
beat = Heartbeat(int(os.environ["RANK"]), timeout_s=float(os.environ.get("TIMEOUT", 900)))
def save(number, frame):
    with beat.during(Phase.SAVING):
        time.sleep(0.3)
    sys.exit(75)
if "BEGUN" in os.environ:
    signal.signal(signal.SIGTERM, save if os.environ["BEGUN"] == "saves" else signal.SIG_IGN)
    if os.environ["BEGUN"] == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ["BEGUN"] == "stubborn":
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
    beat.begin()
while True:
    if "STEPS" in os.environ:
        beat.beat()
    time.sleep(0.02)
"""
Play = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "heartbeats").mkdir()
    return tmp_path / "heartbeats"


@pytest.fixture
def play(folder: Path) -> Iterator[Play]:
    """Starts a process that plays a rank, and waits for its first sign."""
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, **environ: str) -> subprocess.Popen[bytes]:
        own = {HEARTBEAT_VARIABLE: str(folder), "RANK": str(rank), **environ}
        process = subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **own})
        started.append(process)
        wait_until(lambda: any(sign.pid == process.pid for sign in Lookout(folder).signs()))
        if "BEGUN" in environ:
            wait_until(lambda: all(one.has_begun for one in look(folder, process.pid)))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def look(folder: Path, pid: int) -> list[object]:
    return [one for one in Lookout(folder).look() if one.pid == pid]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hang(*, answers: bool) -> Hang:
    return Hang("no step for 1 s", 1.0, None, answers, ())


def test_stray_files_and_processes_that_are_gone_are_passed_over(folder: Path, play: Play) -> None:
    process = play(0)
    sign = next(iter(Lookout(folder).signs()))
    (folder / "notes.txt").write_text("x")
    (folder / "1-x").write_text("x")
    (folder / "1-2-3").write_text("x")
    (folder / "7-8").write_bytes(b"\xff\x00 no sign")
    (folder / "8-9").mkdir()
    # Another process has the number of a rank that is gone.
    other = (
        sign.to_bytes()
        .replace(b'"rank": 0', b'"rank": 5')
        .replace(f'"pid": {sign.pid}'.encode(), f'"pid": {os.getpid()}'.encode())
    )
    (folder / f"5-{os.getpid()}").write_bytes(other)
    assert [one.pid for one in Lookout(folder).look()] == [process.pid]
    process.kill()
    process.wait()
    assert Lookout(folder).look() == []
    assert Lookout(folder / "gone").look() == []


def test_children_are_seen_before_they_leave_a_sign(folder: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "3"})
    try:
        lookout = Lookout(folder, launcher=os.getpid())
        wait_until(lambda: [(one.rank, one.pid) for one in lookout.look()] == [(3, process.pid)])
    finally:
        process.kill()
        process.wait()


def test_a_thread_of_the_launcher_may_end_while_children_are_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "children":
            raise ProcessLookupError(3, "No such process")
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert Lookout(folder, launcher=os.getpid()).look() == []


def test_a_slow_rank_saves_and_leaves(folder: Path, play: Play) -> None:
    process = play(0, BEGUN="saves")
    assert stop_ranks(Lookout(folder), hang(answers=True)) == []
    assert process.wait(10) == 75


def test_a_rank_that_does_not_answer_shows_its_stacks(
    folder: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ASK_S", 0.2)
    process = play(0, BEGUN="deaf")
    assert stop_ranks(Lookout(folder), hang(answers=True)) == []
    assert process.wait(10) == -signal.SIGABRT


def test_a_rank_that_is_stopped_is_not_asked(folder: Path, play: Play) -> None:
    process = play(0, BEGUN="saves")
    process.send_signal(signal.SIGSTOP)
    stop_ranks(Lookout(folder), hang(answers=False))
    assert process.wait(10) == -signal.SIGABRT


def test_what_ignores_all_else_is_killed(
    folder: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ASK_S", 0.2)
    monkeypatch.setattr(stopping, "STACKS_S", 0.2)
    process = play(0, BEGUN="stubborn")
    assert stop_ranks(Lookout(folder), hang(answers=True)) == []
    assert process.wait(10) == -signal.SIGKILL


def test_the_watch_survives_a_stray_file_and_finds_the_hang(folder: Path, play: Play) -> None:
    process = play(0, TIMEOUT="2", STEPS="1", BEGUN="saves")
    said: list[str] = []
    with Watchdog(Lookout(folder), said.append) as watchdog:
        (folder / "stray").write_text("x")
        time.sleep(0.5)
        assert watchdog.hang is None
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: watchdog.hang is not None)
        assert process.wait(10) == -signal.SIGABRT
    assert said == []


def test_a_request_before_the_first_step_ends_all_ranks_at_once(folder: Path, play: Play) -> None:
    first, second = play(0), play(1, BEGUN="saves")
    relay = SignalRelay()
    relay.deliver(Lookout(folder).look())
    relay.note(signal.SIGINT, None)
    relay.deliver(Lookout(folder).look())
    assert first.wait(10) == -signal.SIGTERM
    # It had begun just before, saves, and is not told twice.
    assert second.wait(10) == 75
    assert not relay.has_saved


def test_ctrl_c_is_answered_then_asks_and_a_third_one_does_not_wait(
    folder: Path, play: Play, capfd: pytest.CaptureFixture[str]
) -> None:
    process = play(0, BEGUN="deaf")
    relay = SignalRelay()
    for answer in ("what was trained is saved first", "once more to end without a save"):
        relay.note(signal.SIGINT, None)
        assert answer in capfd.readouterr().err
        relay.deliver(Lookout(folder).look())
        time.sleep(0.2)
        assert process.poll() is None
    relay.note(signal.SIGINT, None)
    relay.deliver(Lookout(folder).look())
    assert process.wait(10) == -signal.SIGKILL
