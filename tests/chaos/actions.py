"""What befalls a job in the long chaos tests: kills, stops and suspends, and when they come.

A `Moment` waits until the job is somewhere in its life, and an `Action` then does something to it.
Both take any launcher whose ranks are its children: `shardwise train`, `shardwise torchrun` and
torchrun itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos_ranks import ranks_of

from shardwise.training.heartbeat import birth_of, stat_of

# Longer than the hang timeout of the jobs that are suspended.
SUSPENDED_S = 10.0
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a command."""

    launcher: int
    """Process id."""

    output: Path
    """What it prints."""

    born: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "born", birth_of(self.launcher))

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that run now, by rank."""
        return ranks_of(self.launcher) if self.alive() else {}

    def alive(self) -> bool:
        """Whether the launcher runs; one that its parent has not waited for has ended."""
        return Process(self.launcher, self.born).alive()

    def said(self) -> str:
        """All that it printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a job's life."""

    name: str
    wait: Callable[[Job, Random], None]
    """Returns when it has come, or when the job ended before it."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that befalls a job."""

    name: str
    act: Callable[[Job, Random], None]
    ends: bool = True
    """Whether the job, or at least its ranks, end by it. A suspended job must not."""


def _until(job: Job, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while job.alive() and not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _at_once(job: Job, chance: Random) -> None:
    """The launcher itself is importing, planning or taking the run directory."""
    time.sleep(1.5 * chance.random())


def _ranks_start(job: Job, chance: Random) -> None:
    """The ranks are importing, meeting, reading the data or the weights."""
    _until(job, job.ranks)
    time.sleep(5 * chance.random())


def _ranks_train(job: Job, chance: Random) -> None:
    """The first line of this start is printed."""
    before = job.said().count("\nstep ")
    _until(job, lambda: job.said().count("\nstep ") > before)
    time.sleep(2 * chance.random())


def _ranks_save(job: Job, chance: Random) -> None:
    """A save was announced, and the next is under way or soon will be."""
    before = job.said().count("\nsaved step ")
    _until(job, lambda: job.said().count("\nsaved step ") > before)
    time.sleep(0.5 * chance.random())


def _kill_rank(job: Job, chance: Random) -> None:
    if ranks := list(job.ranks().values()):
        send(chance.choice(ranks), signal.SIGKILL)


def _kill_launcher(job: Job, chance: Random) -> None:
    """Its ranks are orphans, which save and leave."""
    send(job.launcher, signal.SIGKILL)


def _kill_all(job: Job, chance: Random) -> None:
    """As a machine that loses power."""
    for pid in [job.launcher, *job.ranks().values()]:
        send(pid, signal.SIGKILL)


def _stop_rank(job: Job, chance: Random) -> None:
    """It never goes on by itself: the job's watch must notice."""
    if ranks := list(job.ranks().values()):
        send(chance.choice(ranks), signal.SIGSTOP)


def _leave_stopped_orphan(job: Job, chance: Random) -> None:
    """A launcher that is killed while one of its ranks stands still; the rank goes on later."""
    ranks = list(job.ranks().values())
    stopped = chance.choice(ranks) if ranks else None
    if stopped is not None:
        send(stopped, signal.SIGSTOP)
    send(job.launcher, signal.SIGKILL)
    time.sleep(SUSPENDED_S * chance.random())
    if stopped is not None:
        send(stopped, signal.SIGCONT)


def _suspend_job(job: Job, chance: Random) -> None:
    """All of it, launcher included, as Slurm suspends a job; then all of it goes on."""
    pids = [job.launcher, *job.ranks().values()]
    for pid in pids:
        send(pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    chance.shuffle(pids)
    for pid in pids:
        send(pid, signal.SIGCONT)


def _ask(number: signal.Signals) -> Callable[[Job, Random], None]:
    def act(job: Job, chance: Random) -> None:
        send(job.launcher, number)

    return act


MOMENTS = (
    Moment("at once", _at_once),
    Moment("ranks start", _ranks_start),
    Moment("ranks train", _ranks_train),
    Moment("ranks save", _ranks_save),
)
ACTIONS = (
    Action("kill rank", _kill_rank),
    Action("kill launcher", _kill_launcher),
    Action("kill all", _kill_all),
    Action("stop rank", _stop_rank),
    Action("stopped orphan", _leave_stopped_orphan),
    Action("suspend job", _suspend_job, ends=False),
    Action("SIGTERM", _ask(signal.SIGTERM)),
    Action("SIGINT", _ask(signal.SIGINT)),
    Action("SIGUSR1", _ask(signal.SIGUSR1)),
)


def send(pid: int, number: signal.Signals) -> None:
    """To a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Process:
    """A process that another one with the same number is not taken for: a busy machine gives all
    numbers anew within minutes, and some of them to strangers."""

    pid: int
    born: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The one that has the number now."""
        return cls(pid, birth_of(pid))

    def alive(self) -> bool:
        """Whether it has not ended; one that nobody has waited for yet has."""
        stat = stat_of(self.pid)
        return bool(stat) and stat[0] != "Z" and int(stat[19]) == self.born

    def send(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self.alive():
            send(self.pid, number)


def lives(pid: int) -> bool:
    """Whether a process that was started just now has not ended."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] != "Z"
