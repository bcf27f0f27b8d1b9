"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from shardwise.data.size import size_of_data
from shardwise.plan.explain import (
    alternative_rows,
    choice_rows,
    difference_rows,
    forecast_rows,
    headline,
    memory_rows,
)
from shardwise.plan.picture import picture_lines
from shardwise.plan.plan import Plan
from shardwise.plan.whole_run import WholeRun, whole_run, whole_run_rows


def show_plan(plan: Plan, top: int, budget_tokens: float | None) -> None:
    """Headline, decisions with reasons, memory and speed of one rank, what else was considered."""
    typer.echo(headline(plan))
    show_table(choice_rows(plan))
    for line in picture_lines(plan):
        typer.echo(line)
    typer.echo("memory of one rank at the peak, expected")
    show_table(memory_rows(plan))
    typer.echo("speed and cost, expected")
    show_table(forecast_rows(plan, budget_tokens))
    typer.echo("this run, without its start, evaluations and saves")
    show_table(whole_run_rows(run_of(plan)))
    if top and plan.alternatives:
        typer.echo("considered besides (tok/s/gpu, memory)")
        show_table(alternative_rows(plan, top))
    show_warnings(plan)


def run_of(plan: Plan) -> WholeRun:
    """All of the run, over the data that this machine has."""
    return whole_run(plan, size_of_data(plan.config.data, plan.decided.tokenizer))


def show_difference(before: Plan, after: Plan) -> None:
    """What a change of the configuration changes."""
    runs = zip(*(whole_run_rows(run_of(plan)) for plan in (before, after)), strict=True)
    changed = [(f"run's {name}", old, new) for (name, old), (_, new) in runs if old != new]
    rows = [*difference_rows(before, after), *changed]
    typer.echo("what the change does" if rows else "the change makes no difference")
    show_table([(name, old, "->", new) for name, old, new in rows])


def show_table(rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Columns as wide as their widest cell, the last one free."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        typer.echo("  " + "  ".join(cells).rstrip(), err=err)


def show_warnings(plan: Plan) -> None:
    """What the planner could not make safe."""
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
