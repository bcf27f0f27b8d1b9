from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_seen import Clock, seen

from shardwise.launch.awake import AwakeClock
from shardwise.launch.hang import Hang, Judge, describe_hang
from shardwise.launch.lookout import Seen
from shardwise.training.heartbeat import LONG_S, READING_S, Phase

TIMEOUT_S = 6.0
LOOK_S = 0.5


class Night:
    """A judge that looks twice a second at what a test shows it."""

    def __init__(self, timeout_s: float | None = TIMEOUT_S) -> None:
        self.clock = Clock()
        self.judge = Judge(timeout_s, AwakeClock(self.clock))

    def pass_by(self, seconds: float, show: Callable[[int], list[Seen]]) -> Hang | None:
        """The first hang that is seen in these seconds; `show` gets the number of the look."""
        for look in range(int(seconds / LOOK_S)):
            if (hang := self.judge.judge(show(look))) is not None:
                return hang
            self.clock.now += LOOK_S
        return None


def test_ranks_that_step_do_not_hang() -> None:
    assert Night().pass_by(600, lambda look: [seen(0, beat=look), seen(1, beat=look)]) is None


def test_ranks_without_a_step_hang() -> None:
    hang = Night().pass_by(8, lambda look: [seen(0), seen(1)])
    assert hang is not None and hang.what == "no step for 6 s" and hang.culprit is None
    assert hang.answers
    assert Night().pass_by(5, lambda look: [seen(0), seen(1)]) is None


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase != Phase.TRAINING])
def test_all_but_a_step_may_take_long(phase: Phase) -> None:
    """The others wait for the one that saves, say, and are not overdue for that."""
    ranks = [seen(0, phase=phase), seen(1)]
    long_s = READING_S if phase == Phase.READING else LONG_S
    night = Night()
    assert night.pass_by(long_s - 5, lambda look: ranks) is None
    hang = night.pass_by(10, lambda look: ranks)
    assert hang is not None and hang.what == f"no progress for {long_s:.0f} s while {phase}"


@pytest.mark.parametrize("phase", [Phase.IMPORTING, Phase.SAVING, Phase.TRAINING])
def test_a_rank_that_is_stopped_hangs_whatever_it_is_at(phase: Phase) -> None:
    """The other one may even show progress."""

    def show(look: int) -> list[Seen]:
        return [seen(0, beat=look), seen(1, phase=phase, state="T", begun=False)]

    assert Night().pass_by(6, show) is None
    hang = Night().pass_by(8, show)
    assert hang is not None and (hang.culprit, hang.what) == (1, "it was stopped for 6 s")
    # No request would reach it.
    assert not hang.answers


def test_a_rank_that_goes_on_in_time_does_not_hang() -> None:
    def show(look: int) -> list[Seen]:
        return [seen(0, beat=look, state="T" if look % 10 else "R")]

    assert Night().pass_by(60, show) is None


def test_a_stopped_rank_is_found_before_its_first_sign() -> None:
    hang = Night().pass_by(8, lambda look: [Seen(0, 100, "T", None), seen(1, beat=look)])
    assert hang is not None and hang.culprit == 0


def test_a_rank_that_cannot_leave_signs_is_not_overdue() -> None:
    assert Night().pass_by(60, lambda look: [Seen(0, 100, "S", None), seen(1)]) is None


def test_a_suspended_watch_counts_no_time() -> None:
    """Whoever suspends the job suspends its watch; all show the same as before afterwards."""
    night = Night()
    assert night.pass_by(3, lambda look: [seen(0), seen(1)]) is None
    night.clock.now += 3600.0
    assert night.pass_by(1, lambda look: [seen(0), seen(1)]) is None
    assert night.pass_by(4, lambda look: [seen(0), seen(1)]) is not None


def test_without_a_limit_the_ranks_say_theirs() -> None:
    said = Night(None).pass_by(5, lambda look: [seen(0, timeout_s=3.0)])
    assert said is not None and said.timeout_s == 3.0
    assert Night(None).pass_by(890, lambda look: [seen(0)]) is None


def test_a_rank_that_knows_no_limit_yet_has_that_of_the_others() -> None:
    def show(look: int) -> list[Seen]:
        return [seen(0, beat=look, timeout_s=3.0), Seen(1, 101, "T", None)]

    hang = Night(None).pass_by(5, show)
    assert hang is not None and (hang.culprit, hang.timeout_s) == (1, 3.0)


def test_a_hang_names_rank_collective_and_stacks(tmp_path: Path) -> None:
    waits = 'Fatal Python error: Aborted\n  File "/x/distributed_c10d.py", line 7 in all_gather\n'
    logs = []
    for rank, text in ((0, waits), (1, "Fatal Python error: Aborted\n")):
        (tmp_path / f"rank-{rank}.log").write_text(text)
        logs.append((rank, str(tmp_path / f"rank-{rank}.log")))
    error = describe_hang(Hang("no step for 6 s", 6.0, None, True, tuple(logs)))
    assert error.what == "rank 1 hung: no step for 6 s"
    assert error.why == "the others waited in all_gather"
    assert error.fix == (
        f"stacks of all ranks are in {tmp_path}; to wait longer write train.hang_timeout_s=12"
    )


def test_a_hang_before_there_is_a_log_names_the_innermost_function(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks-0-100"
    stacks.write_text(
        "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/import.py", line 3 in load\n  File "/x/rank.py", line 1 in <module>\n'
    )
    logs = ((0, str(stacks)), (1, str(tmp_path / "gone")))
    error = describe_hang(Hang("no progress for 1800 s while importing", 6.0, None, False, logs))
    assert error.why == "no collective was under way; rank 0 was in load (/x/import.py:3)"
    assert "stacks" not in error.fix
