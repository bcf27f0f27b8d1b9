"""`shardwise verify`: did the run meet its gates? Exits 5 where it did not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from shardwise.cli.find_run import run_or_name
from shardwise.cli.show import show_table
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.read_events import read_record

_WIDTH = 80


def verify(
    runs: Annotated[
        list[Path],
        typer.Argument(help="A run directory or its name; with --parity two.", parser=run_or_name),
    ],
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare the losses of two runs instead.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="With --parity: largest relative difference; 0: the same bits.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gates as JSON.")] = False,
) -> None:
    """Judge a run by its gates: figure, bound, verdict, what to do.

    \b
    Examples:
      shardwise verify runs/demo
      shardwise verify runs/demo --json
      shardwise verify --parity runs/before runs/after --tolerance 1e-5
    Next: shardwise report runs/demo
    """
    if parity:
        _verify_parity(runs, tolerance)
        return
    if len(runs) != 1:
        first, second, *_ = (quote(str(run)) for run in runs)
        raise UserError(
            "verify takes one run",
            fix=f"shardwise verify {first}, or compare losses: shardwise verify --parity {first} "
            f"{second}",
        )
    from shardwise.verify.judge import judge_run, validate_passed

    gates = judge_run(runs[0])
    if as_json:
        typer.echo(json.dumps([asdict(gate) for gate in gates], indent=2))
    else:
        rows = [(gate.name, gate.figure, gate.bound, gate.verdict, gate.advice) for gate in gates]
        show_table([("gate", "figure", "bound", "verdict", "advice"), *rows], width=_WIDTH)
    validate_passed(runs[0], gates)


def _verify_parity(runs: list[Path], tolerance: float) -> None:
    from shardwise.verify.judge import find_file
    from shardwise.verify.parity import compare_losses

    if len(runs) != 2:
        raise UserError("--parity compares two runs", fix="shardwise verify --parity RUN RUN")
    first, second = (read_record(find_file(run, "events.jsonl")) for run in runs)
    found = compare_losses(first.whole, second.whole)
    for run, record in zip(runs, (first, second), strict=True):
        if record.fault:
            typer.echo(f"left out of {run}: {record.fault}")
    if found.steps == 0:
        raise UserError(
            "the two runs have logged no step in common",
            fix="train both with the same observe.log_every, at least to the first step logged",
            code=ExitCode.VERIFY_FAILED,
        )
    same = "the same bits" if found.first_difference is None else f"{found.largest:.1e} apart"
    typer.echo(f"{found.steps} steps compared: {same}")
    if found.largest > tolerance:
        raise UserError(
            f"losses differ from step {found.first_difference} on, by up to {found.largest:.1e}",
            why=f"the tolerance is {tolerance:g}",
            fix=f"where that is near enough, write --tolerance {_rounded_up(found.largest):.1e}",
            code=ExitCode.VERIFY_FAILED,
        )


def _rounded_up(number: float) -> float:
    """Rounded up to two digits, as it is printed."""
    shown = float(f"{number:.1e}")
    return shown if shown >= number else 1.1 * shown
