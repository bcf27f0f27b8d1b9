"""How the ranks of a pipeline spend their time, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank of a pipeline."""

    rank: int
    """Its place among those of the pipeline."""

    busy_s: float
    """Seconds of a step in which it computes."""

    allocated: int
    """The most bytes that it held since the run began."""

    reserved: int


@dataclass(frozen=True, slots=True)
class StageFigures:
    """All ranks of a pipeline over a window of steps."""

    bubble: float
    """The share of forwards and backwards in which a rank waits, as a mean over ranks."""

    ranks: list[RankFigures]
