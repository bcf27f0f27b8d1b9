"""Ranks as a watch sees them, made by hand."""

from __future__ import annotations

from shardwise.launch.lookout import Seen
from shardwise.training.heartbeat import Phase, Sign


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(
    rank: int,
    *,
    beat: int = 1,
    phase: Phase = Phase.TRAINING,
    state: str = "S",
    begun: bool = True,
    timeout_s: float | None = None,
) -> Seen:
    """A rank that has left a sign."""
    sign = Sign(
        rank=rank,
        pid=100 + rank,
        born=1,
        phase=phase,
        beat=beat,
        has_begun=begun,
        timeout_s=timeout_s,
        log=f"/runs/x/logs/attempt-1/rank-{rank}.log",
    )
    return Seen(rank, sign.pid, state, sign)
