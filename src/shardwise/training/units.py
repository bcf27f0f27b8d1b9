"""The unit table that a run prints: what each all-gather moves."""

from __future__ import annotations

from itertools import groupby

from shardwise.model.blocks import Unit, UnitMap
from shardwise.plan.layout import DTYPE_BYTES
from shardwise.plan.plan import Plan
from shardwise.units import format_bytes, format_count


def unit_table(units: UnitMap, plan: Plan) -> list[str]:
    """Header and one line a unit; equal neighbours share a line."""
    width = DTYPE_BYTES[plan.param_dtype.value]
    rows = []
    for _, run in groupby(units.units, key=lambda unit: (unit.is_block, unit.num_params)):
        members = list(run)
        size = members[0].num_params
        rows.append((_label(members), format_count(size), format_bytes(size * width)))
    if units.root_params:
        size = units.root_params
        rows.append(("the root", format_count(size), format_bytes(size * width)))
    longest = max(len(row[0]) for row in rows)
    head = f"{len(units.units)} units, found by {units.found_by}:"
    return [head, *(f"  {name:<{longest}}  {num:>8}  gathers {size}" for name, num, size in rows)]


def _label(members: list[Unit]) -> str:
    if len(members) == 1:
        return members[0].name
    return f"{members[0].name} … {members[-1].name.split('.')[-1]} ({len(members)} x)"
