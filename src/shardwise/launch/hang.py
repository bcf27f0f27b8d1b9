"""Whether the ranks hang, judged by repeated looks at their signs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ExitCode
from shardwise.launch.awake import AwakeClock
from shardwise.launch.failure import Passing
from shardwise.launch.lookout import Seen
from shardwise.launch.stacks import collective_of, place_of
from shardwise.training.heartbeat import Phase, Sign

# The value of `train.hang_timeout_s` for ranks that have not read their configuration yet.
_DEFAULT_S = 900.0


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that make no progress."""

    what: str
    """What the ranks have not done, and for how long."""

    timeout_s: float
    culprit: int | None
    """The rank that the others wait for, where it stands out."""

    answers: bool
    """Whether a rank could still take a request to stop, and has something to save."""

    logs: tuple[tuple[int, str], ...]
    """Where the stacks will be, by rank."""


class Judge:
    """Remembers since when each rank has shown the same sign.

    A rank that is stopped hangs, whatever it is doing. Otherwise ranks wait for each other, so they
    hang only where none of them is within its time limit.
    """

    def __init__(self, timeout_s: float | None = None, clock: AwakeClock | None = None) -> None:
        """`timeout_s` is how long a step may take; None means that the ranks' signs say it."""
        self._timeout_s = timeout_s
        self._said_s = 0.0
        self._clock = clock or AwakeClock()
        self._beats: dict[int, tuple[int, float]] = {}
        self._stopped: dict[int, float] = {}

    def judge(self, ranks: Sequence[Seen]) -> Hang | None:
        """How the ranks hang; None where they do not hang, or too little is known."""
        now = self._clock.read()
        self._note(ranks, now)
        # A rank that has not read its configuration yet has the same one as the others.
        self._said_s = max((one.sign.timeout_s or 0.0 for one in ranks if one.sign), default=0.0)
        for one in ranks:
            limit_s = self._step_s(one.sign)
            if now - self._stopped.get(one.pid, now) > limit_s:
                return _hang(ranks, f"it was stopped for {limit_s:.0f} s", limit_s, one)
        signs = [one.sign for one in ranks if one.sign is not None]
        if not ranks or len(signs) < len(ranks):
            return None
        if not all(now - self._beats[sign.pid][1] > self._allowed_s(sign) for sign in signs):
            return None
        # The rank that has been in its phase longest holds the others up, or waits like them.
        first = min(signs, key=lambda sign: self._beats[sign.pid][1])
        limit_s = self._allowed_s(first)
        what = f"no progress for {limit_s:.0f} s while {first.phase}"
        if first.phase == Phase.TRAINING:
            what = f"no step for {limit_s:.0f} s"
        suspects = [one for one in ranks if one.is_stopped] + [one for one in ranks if one.is_stuck]
        return _hang(ranks, what, limit_s, next(iter(suspects), None))

    def _note(self, ranks: Sequence[Seen], now: float) -> None:
        for one in ranks:
            if one.is_stopped:
                self._stopped.setdefault(one.pid, now)
            else:
                self._stopped.pop(one.pid, None)
            beat = one.sign.beat if one.sign else 0
            if one.pid not in self._beats or self._beats[one.pid][0] != beat:
                self._beats[one.pid] = beat, now

    def _allowed_s(self, sign: Sign) -> float:
        return sign.allowance_s(self._step_s(sign))

    def _step_s(self, sign: Sign | None) -> float:
        said = sign.timeout_s if sign else None
        return self._timeout_s or said or self._said_s or _DEFAULT_S


def _hang(ranks: Sequence[Seen], what: str, limit_s: float, culprit: Seen | None) -> Hang:
    answers = all(one.has_begun and not one.is_stopped and not one.is_stuck for one in ranks)
    logs = tuple((one.rank, one.sign.log) for one in ranks if one.sign and one.sign.log)
    return Hang(what, limit_s, None if culprit is None else culprit.rank, answers, logs)


def describe_hang(hang: Hang) -> Passing:
    """Which rank held the others up, and the collective that they were waiting in."""
    waiting = {rank: collective_of(Path(log)) for rank, log in hang.logs}
    idle = [rank for rank, name in waiting.items() if name is None]
    culprit = hang.culprit
    if culprit is None and len(idle) == 1 and len(waiting) > 1:
        culprit = idle[0]
    names = sorted({name for name in waiting.values() if name})
    where = f"the others waited in {', '.join(names)}" if names else "no collective was under way"
    # These stacks are removed after the start, so the innermost function is all that remains of
    # them.
    early = [(rank, Path(log)) for rank, log in hang.logs if not _stays(log)]
    for rank, place in ((rank, place_of(log)) for rank, log in early):
        where += f"; rank {rank} was in {place}" if place else ""
    return Passing(
        f"{'the ranks' if culprit is None else f'rank {culprit}'} hung: {hang.what}",
        why=where,
        fix=f"{_stacks(log for _, log in hang.logs)}to wait longer write "
        f"train.hang_timeout_s={2 * hang.timeout_s:g}",
        code=ExitCode.WORKER_DIED,
    )


def _stacks(logs: Iterable[str]) -> str:
    """Where the stacks are, if they are kept."""
    folders = sorted({str(Path(log).parent) for log in logs if _stays(log)})
    return f"stacks of all ranks are in {', '.join(folders)}; " if folders else ""


def _stays(log: str) -> bool:
    """Whether the file is a log of the run directory."""
    return log.endswith(".log")
