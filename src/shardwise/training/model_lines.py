"""What a run prints about its model: what each all-gather moves, what float8 changes, and what
host memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwise.internals.parts import (
    CHANGES,
    COPIES,
    GATHERS,
    POSITIONS,
    REDUCTIONS,
    SUMS,
    Part,
    public_note,
)
from shardwise.kernels.own import kernels_note, uses_own
from shardwise.model.blocks import Unit, UnitMap
from shardwise.parallel.mesh import World
from shardwise.parallel.torchao_float8 import Layer, gathered_in_float8
from shardwise.plan.decisions import DTYPE_BYTES
from shardwise.plan.host_activations import chosen
from shardwise.plan.planned import Plan
from shardwise.plan.stage_recompute import modes_of
from shardwise.units import format_bytes, format_count


def unit_table(units: UnitMap, plan: Plan, layers: Sequence[Layer] = ()) -> list[str]:
    """A header and one line for each unit. Equal neighbours share a line. `layers` are those of
    float8."""
    width = DTYPE_BYTES[plan.decided.param_dtype]
    rows = []
    for _, run in groupby(units.units, key=lambda unit: (unit.is_block, unit.num_params)):
        members = list(run)
        size = members[0].num_params
        gathered = size * width - gathered_in_float8(members[0], layers) * (width - 1)
        rows.append((_label(members), format_count(size), format_bytes(gathered)))
    if units.root_params:
        size = units.root_params
        rows.append(("the root", format_count(size), format_bytes(size * width)))
    longest = max(len(row[0]) for row in rows)
    head = f"{len(units.units)} units, found by {units.found_by}:"
    return [head, *(f"  {name:<{longest}}  {num:>8}  gathers {size}" for name, num, size in rows)]


def float8_table(layers: Sequence[Layer], plan: Plan) -> list[str]:
    """How many layers multiply in float8, then each kind that does not, and why; none without."""
    if not layers:
        return []
    changed = [layer for layer in layers if layer.why_not is None]
    gathered = sum(layer.gathers_float8 for layer in changed)
    scales = f"one scale per {'row' if plan.decided.float8_rowwise else 'tensor'}"
    head = (
        f"{len(changed)} of {len(layers)} linear layers multiply in float8 ({scales}), and "
        f"{gathered} are gathered in it"
    )
    left: dict[tuple[str, str], int] = {}
    for layer in layers:
        if layer.why_not is not None:
            kind = (layer.name.split(".")[-1], layer.why_not)
            left[kind] = left.get(kind, 0) + 1
    dtype = plan.decided.param_dtype
    rows = [f"  {dtype}: {count} x {name} ({why})" for (name, why), count in left.items()]
    return [head, *rows]


def notes_of(units: UnitMap, plan: Plan, world: World) -> list[str]:
    """Further notes: kernels that are not the plan's, private parts that are not used, activations
    in host memory."""
    total = len(units.blocks)
    count = len(chosen(total, plan.decided.offload_activations))
    waiting = f"activations of {count} of {total} blocks are in host memory until backward"
    private = public_note(_private_parts(plan, world))
    notes = (kernels_note(plan), private, waiting if count else None)
    return [note for note in notes if note]


def _private_parts(plan: Plan, world: World) -> list[Part]:
    """The private parts of torch and transformers that a run of this plan would use."""
    selective = "selective" in modes_of(plan.decided) and not plan.decided.compile
    used = {
        GATHERS: plan.decided.gather_in_place,
        COPIES: uses_own(plan),
        REDUCTIONS: world.size == 1 or plan.cluster.device == "cuda",
        SUMS: plan.decided.compile,
        CHANGES: selective,
        POSITIONS: True,
    }
    return [part for part, is_used in used.items() if is_used]


def _label(members: list[Unit]) -> str:
    if len(members) == 1:
        return members[0].name
    return f"{members[0].name} … {members[-1].name.split('.')[-1]} ({len(members)} x)"
