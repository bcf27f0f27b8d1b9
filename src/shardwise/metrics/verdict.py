"""Whether a run did what its plan said, and if not, which part of the plan was wrong."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.plan.planned import Forecast, Plan
from shardwise.plan.stage_rows import first_rank_memory
from shardwise.units import format_bytes, format_count, speed_unit

# How far a measurement may be from the plan before it is reported.
SPEED_BAND = 0.10
MEMORY_BAND = 0.05


def plan_misses(plan: Plan, steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each figure outside its band; `steps` are the run's step events."""
    # The first logged step of a start holds warm-up and compilation.
    steady = steps[1:]
    if plan.forecast is not None and steady:
        yield from _speed_miss(plan.forecast, steady, speed_unit(plan.cluster.device))
    if plan.cluster.device == "cuda" and steps:
        yield from _memory_miss(plan, steps[-1]["memory"]["allocated"])


def _speed_miss(forecast: Forecast, steps: Sequence[dict[str, Any]], unit: str) -> Iterator[str]:
    planned = forecast.tokens_per_s
    found = statistics.median(step["tokens_per_s"] for step in steps)
    miss = found / planned - 1
    if abs(miss) <= SPEED_BAND:
        return
    waiting = statistics.median(step["data_share"] for step in steps)
    if miss < 0 and waiting > -miss / 2:
        cause = f"{waiting:.0%} of the time went to waiting for data; the plan expects none"
    else:
        cause = (
            f"its largest estimated terms are {_estimated(forecast)}; `shardwise tunnel` measures"
        )
        cause += " them, `shardwise plan --calibrate` the rates behind them"
    yield (
        f"{format_count(found)} {unit} is {miss:+.0%} of the plan's {format_count(planned)} "
        f"(band {SPEED_BAND:.0%}): {cause}"
    )


def _memory_miss(plan: Plan, allocated: int) -> Iterator[str]:
    memory = first_rank_memory(plan)
    planned = memory.allocated
    miss = allocated / planned - 1
    if abs(miss) <= MEMORY_BAND:
        return
    parts = {"activations": memory.activations, "loss": memory.loss}
    parts |= {"buffers": memory.buffers, "recompute": memory.recompute}
    name = max(parts, key=lambda part: parts[part])
    yield (
        f"{format_bytes(allocated)} allocated is {miss:+.0%} of the plan's {format_bytes(planned)} "
        f"(band {MEMORY_BAND:.0%}): parameters, gradients and Adam are exact, so the rest is "
        f"off; its largest part is {name} ({format_bytes(parts[name])})"
    )


def _estimated(forecast: Forecast) -> str:
    """Terms that rest on rates, largest first."""
    ordered = sorted(forecast.terms.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {s / forecast.step_s:.0%}" for name, s in ordered)
