"""A plan as text: what was decided, why, and what a rank will hold."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardwise.plan.plan import Plan
from shardwise.units import format_bytes, format_count


def headline(plan: Plan) -> str:
    """One line: model, cluster, mesh, batch."""
    return (
        f"{plan.model.name} ({format_count(plan.model.total_params)} parameters) on "
        f"{plan.cluster.name}: {plan.strategy.value}, mesh replicate={plan.replicate.value} x "
        f"shard={plan.shard.value}, {format_count(plan.tokens_per_step)} tokens a step"
    )


def choice_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(decision, value, source, why) for every decision."""
    return [
        (name, _show(choice.value), choice.source, choice.why)
        for name, choice in plan.choices().items()
    ]


def memory_rows(plan: Plan) -> list[tuple[str, str]]:
    """(what, bytes) of one rank's expected peak, the total last."""
    rows = [
        (item.name, format_bytes(getattr(plan.memory, item.name))) for item in fields(plan.memory)
    ]
    capacity = format_bytes(plan.cluster.memory_bytes)
    return [*rows, ("total", f"{format_bytes(plan.memory.total)} of {capacity}")]


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
