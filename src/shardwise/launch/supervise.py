"""Start ranks again when one dies or hangs: a fresh store each time, up to a budget."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from shardwise.errors import ExitCode, UserError
from shardwise.launch.failure import Passing
from shardwise.launch.stacks import collective_of
from shardwise.metrics.events import EventLog, read_whole_events
from shardwise.plan.plan import Plan
from shardwise.training.signals import stop_signals_handled_by

# How often heartbeats are looked at and signals passed on.
_POLL_S = 0.1


def why_final(error: UserError, plan: Plan, restarts: int, step_before: int) -> str | None:
    """Why another start of the ranks would not help; None where it may."""
    budget = plan.config.train.max_restarts
    if not isinstance(error, Passing):
        return "the ranks were not started again, because the same error would come again"
    if restarts >= budget:
        return f"the ranks were started again {restarts} times; train.max_restarts={budget}"
    if restarts > 0 and last_step(plan.run_dir) <= step_before:
        return "the ranks were not started again: the last start got no further than before"
    return None


def with_reason(error: UserError, reason: str) -> UserError:
    """The error of a rank that died, and why the ranks were not started again."""
    if error.code != ExitCode.WORKER_DIED:
        return error
    why = f"{error.why}; {reason}" if error.why else reason
    return UserError(error.what, why=why, fix=error.fix, code=error.code)


def announce_restart(error: UserError, plan: Plan, restarts: int) -> None:
    """One line for people, one event for the record."""
    budget = plan.config.train.max_restarts
    cause = f"{error.what} ({error.why})" if error.why else error.what
    text = f"ALERT: {cause}; starting the ranks again ({restarts} of {budget})\n"
    sys.stdout.write(text)
    sys.stdout.flush()
    with EventLog(plan.run_dir / "events.jsonl", enabled=True) as events:
        events.write("restart", reason=error.what, why=error.why, number=restarts)


def last_step(run_dir: Path) -> int:
    """The last step that the run's record shows."""
    path = run_dir / "events.jsonl"
    events = read_whole_events(path) if path.exists() else []
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


class SignalRelay:
    """Passes requests to stop on to the ranks, which save and leave; also to ranks yet to come."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.folder: Path | None = None
        self._told: set[int] = set()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.number = number
        self.deliver()

    def deliver(self) -> None:
        """Tell every rank that has shown a sign of life since the request."""
        if self.number is None or self.folder is None:
            return
        for _, pid in _ranks(self.folder):
            if pid not in self._told:
                self._told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, self.number)


@contextmanager
def relayed_signals() -> Iterator[SignalRelay]:
    """A relay for the signals that ask to stop, while the block runs."""
    relay = SignalRelay()
    with stop_signals_handled_by(relay.note):
        yield relay


class Watchdog:
    """Watches heartbeats; ranks without one for too long are aborted with their stacks dumped."""

    def __init__(self, folder: Path, timeout_s: float, relay: SignalRelay) -> None:
        self.folder = folder
        self.relay = relay
        self.timeout_s = timeout_s
        self.culprit: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def fired(self) -> bool:
        """Whether the ranks were aborted."""
        return self.culprit is not None

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self.relay.deliver()
            ranks = list(_ranks(self.folder))
            # Before its first step a rank may tokenise or compile for long; its file is empty then.
            states = [path.stat() for path in self.folder.iterdir()]
            beats = [state.st_mtime for state in states if state.st_size]
            if beats and time.time() - max(beats) > self.timeout_s:
                self.culprit = _suspect(ranks)
                _abort(ranks)
                return


def describe_hang(watchdog: Watchdog, logs: Path) -> UserError:
    """Which rank held the others up, and what they were waiting in."""
    newest = max(logs.glob("attempt-*"), key=lambda path: int(path.name.split("-")[1]))
    waiting = {path.stem: collective_of(path) for path in sorted(newest.glob("rank-*.log"))}
    names = sorted({name for name in waiting.values() if name})
    culprit = watchdog.culprit
    idle = [rank for rank, name in waiting.items() if name is None]
    if culprit == -1:
        culprit = int(idle[0].split("-")[1]) if len(idle) == 1 else -1
    who = f"rank {culprit} hung" if culprit is not None and culprit >= 0 else "the ranks hung"
    where = f"the others waited in {', '.join(names)}" if names else "no collective was under way"
    return Passing(
        f"{who}: no step for {watchdog.timeout_s:.0f} s",
        why=where,
        fix=f"stacks of all ranks are in {newest}; to wait longer write "
        f"train.hang_timeout_s={2 * watchdog.timeout_s:g}",
        code=ExitCode.WORKER_DIED,
    )


def _ranks(folder: Path) -> Iterator[tuple[int, int]]:
    """(rank, process id) of every rank that has shown a sign of life."""
    for path in folder.iterdir():
        rank, pid = path.name.split("-")
        yield int(rank), int(pid)


def _suspect(ranks: list[tuple[int, int]]) -> int:
    """A rank that the kernel has stopped or that sits in the kernel; -1 where none stands out."""
    for rank, pid in ranks:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "TtD":
                return rank
    return -1


def _abort(ranks: list[tuple[int, int]]) -> None:
    for _, pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)  # a stopped process takes the signal only when it goes on
