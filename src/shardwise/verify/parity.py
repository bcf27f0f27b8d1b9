"""Whether two runs are the same, by their losses, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parity:
    """How two runs' losses compare over the steps that both have logged."""

    steps: int
    first_difference: int | None
    """The first step whose losses are not the same bits."""

    largest: float
    """The largest relative difference."""


def compare_losses(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Parity:
    """Compare the last loss that each run has logged for a step."""
    mine, theirs = _losses(one), _losses(other)
    common = sorted(mine.keys() & theirs.keys())
    differing = [step for step in common if mine[step] != theirs[step]]
    relative = [abs(mine[step] - theirs[step]) / max(abs(mine[step]), 1e-30) for step in differing]
    return Parity(len(common), differing[0] if differing else None, max(relative, default=0.0))


def _losses(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}
