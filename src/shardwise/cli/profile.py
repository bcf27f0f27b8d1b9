"""`shardwise profile`: where the time of profiled steps went, and what was exposed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.find_run import run_or_name
from shardwise.cli.show import show_table
from shardwise.errors import UserError
from shardwise.metrics.overlap import GAP_S, Profile, Row, fold, profile_of
from shardwise.metrics.trace_file import newest_trace, read_trace
from shardwise.report.values import percent, short_seconds
from shardwise.units import format_bytes

# Names of kernels spell out all their template arguments.
_WIDEST = 60
_GAPS = 5


def profile(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory or its name, or one trace.", parser=run_or_name),
    ],
    top: Annotated[int, typer.Option(min=1, help="Rows of the longest tables.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say where the time of profiled steps went: compute, exposed communication, copies, idle.

    It shows communication by kind, by axis of the mesh beside the plan, and by unit, with the part
    that no compute hid. It shows the gaps in which the device was idle, with the kernel that ended
    them, and the kernels that took longest. A run directory stands for rank 0's newest trace.

    \b
    Examples:
      shardwise train run.yaml observe.profile=20
      shardwise profile runs/demo
      shardwise profile runs/demo/profile/step-20-rank-3.json.gz --top 30
    Next: open the trace in https://ui.perfetto.dev, or shardwise verify runs/demo
    """
    path = _find_trace(run)
    found = profile_of(read_trace(path))
    if as_json:
        data = {"trace": str(path), "summary": found.summary(), **asdict(found)}
        typer.echo(json.dumps(data, indent=2))
        return
    _show(found, path, top)


def _find_trace(given: Path) -> Path:
    """The file itself, or the newest trace in a run directory."""
    path = newest_trace(given) if given.is_dir() else given
    if path is None:
        raise UserError(
            f"{given} has no trace",
            why="no step of it was profiled",
            fix="train with observe.profile=20 (a step that is still to come), then ask again",
        )
    return path


def _show(found: Profile, path: Path, top: int) -> None:
    first, last = found.steps[0].step, found.steps[-1].step
    where = f"rank {found.rank} of {found.world_size}, {found.device}"
    typer.echo(f"{path}: steps {first} to {last}, {where}")
    show_table(list(_step_rows(found)))
    typer.echo(_communication_line(found))
    if found.collectives:
        show_table(list(_collective_rows(found)))
        if found.axes:
            show_table(list(_axis_rows(found)))
        show_table(list(_unit_rows(found, top)))
    typer.echo(_gap_line(found))
    if found.gaps:
        show_table(list(_gap_rows(found, min(top, _GAPS))))
    what = "kernels" if found.device == "cuda" else "operators"
    typer.echo(f"{what} that took longest, per step:")
    show_table(list(_kernel_rows(found, top)))


def _step_rows(found: Profile) -> Iterator[Sequence[str]]:
    yield "step", "time", "compute", "exposed", "copies", "idle"
    for step in found.steps:
        parts = (step.compute_s, step.exposed_s, step.copies_s, step.idle_s)
        shares = (percent(part / step.seconds) for part in parts)
        yield str(step.step), short_seconds(step.seconds), *shares


def _communication_line(found: Profile) -> str:
    moved, exposed = found.mean("communication_s"), found.mean("exposed_s")
    if not moved:
        return "communication: none"
    return (
        f"communication: {short_seconds(moved)} per step, of which {short_seconds(exposed)} "
        f"({exposed / moved:.0%}) exposed"
    )


def _collective_rows(found: Profile) -> Iterator[Sequence[str]]:
    yield "collective", "calls", "time", "exposed", "of it"
    for row in fold(found.collectives, by=lambda row: row.name):
        yield row.name, f"{row.calls:.0f}", *_exposed_cells(row)


def _axis_rows(found: Profile) -> Iterator[Sequence[str]]:
    yield "along", "calls", "a step", "plan", "time", "exposed", "links' time in the plan"
    for axis in found.axes:
        sizes = (format_bytes(size) for size in (axis.num_bytes, axis.planned_bytes))
        times = (short_seconds(s) for s in (axis.seconds, axis.exposed_s, axis.planned_s))
        yield axis.axis, f"{axis.calls:.0f}", *sizes, *times


def _unit_rows(found: Profile, top: int) -> Iterator[Sequence[str]]:
    computed = {row.unit: row.seconds for row in fold(found.kernels, by=lambda row: row.unit)}
    yield "unit", "compute", "communication", "exposed", "of it"
    rows = fold(found.collectives, by=lambda row: row.unit)
    for row in sorted(rows, key=lambda row: -row.exposed_s)[:top]:
        yield row.unit, short_seconds(computed.get(row.unit, 0.0)), *_exposed_cells(row)


def _exposed_cells(row: Row) -> tuple[str, str, str]:
    share = percent(row.exposed_s / row.seconds)
    return short_seconds(row.seconds), short_seconds(row.exposed_s), share


def _gap_line(found: Profile) -> str:
    if not found.gaps:
        return "gaps: none"
    total = sum(gap.seconds for gap in found.gaps) / len(found.steps)
    return (
        f"gaps of {short_seconds(GAP_S)} or more with nothing to do: "
        f"{len(found.gaps) / len(found.steps):.0f} per step, {short_seconds(total)} "
        f"({total / found.step_s:.1%}); the longest:"
    )


def _gap_rows(found: Profile, top: int) -> Iterator[Sequence[str]]:
    for gap in found.gaps[:top]:
        before = f"before {_short(gap.before)}"
        yield short_seconds(gap.seconds), f"in step {gap.step}", before, gap.unit


def _kernel_rows(found: Profile, top: int) -> Iterator[Sequence[str]]:
    yield "time", "share", "calls", "unit", "name"
    rows = (replace(row, unit=_alike(row.unit)) for row in found.kernels)
    for row in fold(rows, by=lambda row: (row.name, row.unit))[:top]:
        share = percent(row.seconds / found.step_s)
        yield short_seconds(row.seconds), share, f"{row.calls:.0f}", row.unit, _short(row.name)


def _alike(unit: str) -> str:
    """Blocks of a stack are alike: `model.layers.*`."""
    return re.sub(r"\d+", "*", unit)


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 1]}…"
