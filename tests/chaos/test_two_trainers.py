"""Two trainers in one run directory: never two writers, never a lost checkpoint.

Who wrote what is taken from a trail that every write leaves beside the run, not from the lock.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_trainer
from actions import Process
from chaos_ranks import LONG, config_of, events_of, newest_good, ranks_of
from interleavings import Stage, Sum

import commands
from forkserver import forkserver
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode

pytestmark = pytest.mark.dist

WRITERS = Path(__file__).parent / "writers"
TIMEOUT_S = 300.0
KEEP = 2


def suspend(pid: int) -> None:
    """Stops a process, and returns once each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_S
    # A thread inside a system call stops when the call returns.
    while {path.read_text().rpartition(")")[2].split()[0] for path in task_states(pid)} != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def task_states(pid: int) -> Iterator[Path]:
    return Path(f"/proc/{pid}/task").glob("*/stat")


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Every file of the run but its lock."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and ".lock" not in path.parts)
    return {str(path): path.read_bytes() for path in files}


# ---- trainers without a model ----------------------------------------------------------------


class Small:
    """`small_trainer`, its launcher and its rank each in a process group of their own."""

    def __init__(self, run_dir: Path, name: str, *, own_host: bool) -> None:
        self.name = name
        self._output = run_dir.with_name(f"{name}.txt")
        self._ranks = run_dir.with_name(f"{name}.ranks")
        self._process = forkserver().Process(
            target=small_trainer.launch, args=(run_dir, name), kwargs={"own_host": own_host}
        )
        self._process.start()

    @property
    def launcher(self) -> int:
        """The process that started the rank."""
        assert self._process.pid is not None
        return self._process.pid

    def pids(self) -> list[int]:
        """Launcher and ranks, without those that have ended."""
        lines = self._ranks.read_text().splitlines() if self._ranks.exists() else []
        ranks = [Process(*map(int, line.split())) for line in lines]
        launcher = [self.launcher] if self._process.is_alive() else []
        return [*launcher, *(rank.pid for rank in ranks if rank.alive())]

    def alive(self) -> bool:
        return self._process.is_alive() or bool(self.pids())

    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""


@pytest.mark.parametrize("seed", range(17 if LONG else 1))
def test_small_trainers_on_one_host(seed: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    stage = Stage(run_dir, seed, lambda name: Small(run_dir, name, own_host=False), unit_s=0.15)

    def enough(total: Sum) -> bool:
        return total.announced > 3 and total.handovers > 0 and total.refused > 0

    try:
        total = stage.play(12, small_trainer.KEEP, enough)
    finally:
        stage.end()
    assert enough(total), total
    assert (total.two_writers, total.lost) == (0, 0), total


@pytest.mark.parametrize("seed", range(34 if LONG else 1))
def test_small_trainers_on_hosts_without_common_locks(seed: int, tmp_path: Path) -> None:
    """Stops outlast the lease here, and who wakes up finds another job in its place."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    stage = Stage(run_dir, seed, lambda name: Small(run_dir, name, own_host=True), unit_s=1.0)

    def enough(total: Sum) -> bool:
        return total.announced > 3 and total.handovers > 0

    try:
        total = stage.play(6, small_trainer.KEEP, enough)
    finally:
        stage.end()
    assert enough(total), total
    assert total.lost == 0, total
    # A line that was on its way when the process was stopped still comes; no second one does.
    assert total.longest_return <= 1, total


def test_an_orphan_that_wakes_up_publishes_nothing(tmp_path: Path) -> None:
    """Its launcher was killed while it stood still, and another host went on with the run."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    trainers: list[Small] = []

    def start() -> Small:
        trainers.append(Small(run_dir, f"writer-{len(trainers)}", own_host=True))
        return trainers[-1]

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, [one.said() for one in trainers]
            time.sleep(0.01)

    def written_by(one: Small) -> list[str]:
        trail = run_dir.with_suffix(".trail")
        lines = trail.read_text().splitlines() if trail.exists() else []
        return [line for line in lines if line.startswith(f"{one.name} ")]

    def published_by(one: Small) -> list[str]:
        return [line for line in written_by(one) if " published " in line]

    try:
        first = start()
        until(lambda: published_by(first))
        launcher = first.launcher
        (orphan,) = set(first.pids()) - {launcher}
        suspend(orphan)
        os.kill(launcher, signal.SIGKILL)
        before = written_by(first)
        saved = {found.step for found in list_checkpoints(run_dir / "checkpoints")}
        second = start()
        until(lambda: len(published_by(second)) > 3)
        os.kill(orphan, signal.SIGCONT)
        until(lambda: orphan not in first.pids())
        until(lambda: len(published_by(second)) > 5)
        # One line may have been on its way when it was stopped: an event, or the word of a
        # checkpoint that was there by then.
        after = written_by(first)[len(before) :]
        on_its_way = [f"{first.name} event", *(f"{first.name} published {step}" for step in saved)]
        assert len(after) <= 1 and set(after) <= set(on_its_way), after
        steps = [int(line.split()[2]) for line in published_by(first) + published_by(second)]
        assert steps == sorted(set(steps))
    finally:
        for one in trainers:
            for pid in one.pids():
                os.kill(pid, signal.SIGKILL)


# ---- the real command ------------------------------------------------------------------------


class Command:
    """`shardwise train` on one CPU: forked off, or installed and with a trail of its writes."""

    def __init__(
        self, run_dir: Path, name: str, launcher: Sequence[str] = (), **settings: Any
    ) -> None:
        self.name = name
        config = run_dir.with_suffix(".json")
        given = {
            **{"cluster__name": "1xCPU", "train__steps": 10**6, "checkpoint__every": 3},
            **{"checkpoint__keep": KEEP, **settings},
        }
        config.write_text(json.dumps(config_of(run_dir, **given)), encoding="utf-8")
        self.output = run_dir.with_name(f"{name}.txt")
        path = os.pathsep.join([str(WRITERS), os.environ.get("PYTHONPATH", "")])
        trail = {"TRAIL": str(run_dir.with_suffix(".trail")), "WRITER": name, "PYTHONPATH": path}
        words = [*launcher, "train", config]
        self.process: commands.Command | subprocess.Popen[bytes]
        if not LONG:
            module = "torch.distributed.run" if launcher else "shardwise"
            self.process = commands.Command(words, self.output, module=module)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            self.process = subprocess.Popen(
                [*(torchrun if launcher else [commands.SHARDWISE]), *map(str, words)],
                stdout=self.output.open("a", encoding="utf-8"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **trail},
            )
        self._known = {Process.of(self.process.pid)}

    def pids(self) -> list[int]:
        """Launcher and ranks, also ranks that have lost their launcher since the last call."""
        self.process.poll()
        mark = f"WRITER={self.name}".encode()
        self._known |= set(map(Process.of, ranks_of(self.process.pid).values()))
        found = {process.pid for process in self._known if process.alive()}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in entries and str(self.output.parent).encode() in b"".join(entries):
                found.add(int(pid))
        return sorted(found)

    def alive(self) -> bool:
        return self.process.poll() is None or bool(self.pids())

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def wait_for(self, pattern: str) -> None:
        """Until it has printed this."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.said()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts the command on one run directory, and ends what a test leaves."""
    started: list[Command] = []

    def start(**settings: Any) -> Command:
        started.append(Command(tmp_path / "run", f"writer-{len(started)}", **settings))
        return started[-1]

    yield start
    for command in started:
        for pid in command.pids():
            os.kill(pid, signal.SIGKILL)
        command.process.wait()


TORCHRUN = ["--standalone", "--nproc-per-node", "2", "-m", "shardwise"]


@pytest.mark.slow
def test_the_second_trainer_is_refused_and_writes_nothing(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    first = train()
    first.wait_for("saved step 3")
    (rank,) = set(first.pids()) - {first.process.pid}
    # Nothing is written by the first one either, so that the second one's writes would show.
    for pid in (rank, first.process.pid):
        suspend(pid)
    before = snapshot(tmp_path / "run")
    second = train(optim__lr=1e-5)
    assert second.finish() == ExitCode.ENVIRONMENT, second.said()
    holder = f"process {first.process.pid} on {socket.gethostname()}"
    refusal = f"{tmp_path / 'run'} is in use by another job: {holder}"
    assert refusal in second.said()
    # torchrun may end a rank before it has spoken, but lets no rank train.
    ranks = train(launcher=TORCHRUN, cluster__name="2xCPU")
    assert ranks.finish() != 0
    assert refusal in ranks.said(), ranks.said()
    assert snapshot(tmp_path / "run") == before
    # Ranks that outlive their launcher keep the next one out, which then goes on with their save.
    first.process.kill()
    third = train(train__steps=10**6)
    third.wait_for(f"waiting for processes {rank}, whose launcher is gone")
    os.kill(rank, signal.SIGCONT)
    third.wait_for("resumed at step|is in use by processes")
    while "is in use by processes" in third.said():
        # A busy machine may save for longer than a start waits.
        third = train(train__steps=10**6)
        third.wait_for("resumed at step|is in use by processes")
    (stopped,) = events_of(tmp_path / "run", "stopped")
    third.wait_for("saved step")
    third.process.send_signal(signal.SIGTERM)
    assert third.finish() == ExitCode.PREEMPTED, third.said()
    (resumed,) = events_of(tmp_path / "run", "resume")
    assert resumed["step"] == stopped["step"]
    assert newest_good(tmp_path / "run") > stopped["step"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_the_command_interleaved(seed: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    stage = Stage(run_dir, seed, lambda name: Command(run_dir, name), unit_s=5.0)

    def enough(total: Sum) -> bool:
        assert (total.two_writers, total.lost) == (0, 0), total
        is_much = total.announced > 50 and total.handovers > 12 and total.refused > 12
        return is_much and total.interleavings >= 50

    try:
        total = stage.play(10, KEEP, enough)
    finally:
        stage.end()
    assert enough(total), total
    for checkpoint in list_checkpoints(run_dir / "checkpoints"):
        assert check_checkpoint(checkpoint.path) == []
