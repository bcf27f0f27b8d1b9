"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

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
from shardwise.plan.planned import Plan
from shardwise.plan.whole_run import WholeRun, mixture_rows, whole_run, whole_run_rows
from shardwise.units import speed_unit

_WIDTH = 80
# A last column that begins further right has too little room beside it.
_FAR = 30
_WIDEST = 12


def wrapped(text: str) -> str:
    """A sentence in lines that fit; names and paths stay whole."""
    return "\n".join(
        wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    )


def show_plan(plan: Plan, top: int, budget_tokens: float | None) -> None:
    """Headline, decisions with reasons, memory and speed of one rank, what else was considered."""
    typer.echo(wrapped(headline(plan)))
    show_table([("decision", "value", "by", "why"), *choice_rows(plan)], width=_WIDTH)
    for line in picture_lines(plan):
        typer.echo(line)
    typer.echo("memory of one rank at the peak, expected")
    show_table(memory_rows(plan), width=_WIDTH)
    typer.echo("speed and cost, expected")
    show_table(forecast_rows(plan, budget_tokens), width=_WIDTH)
    typer.echo("this run, without its start, evaluations and saves")
    run = run_of(plan)
    show_table(whole_run_rows(run), width=_WIDTH)
    show_mixture(run)
    if top and plan.alternatives:
        typer.echo("considered besides")
        header = (speed_unit(plan.cluster.device), "memory", "plan, and why it lost")
        rows = [(speed, held, f"{label}: {why}") for label, speed, held, why in
                alternative_rows(plan, top)]  # fmt: skip
        show_table([header, *rows], width=_WIDTH)
    show_warnings(plan)


def show_mixture(run: WholeRun) -> None:
    """What each dataset of a mixture has in the run, where there is one."""
    if run.mixture:
        typer.echo("the mixture, by the weights of data.mixture")
        show_table(mixture_rows(run), width=_WIDTH)


def run_of(plan: Plan) -> WholeRun:
    """All of the run, over the data that this machine has."""
    return whole_run(plan, size_of_data(plan.config.data, plan.decided.tokenizer))


def show_difference(before: Plan, after: Plan, budget_tokens: float | None) -> None:
    """What a change of the configuration changes."""
    runs = zip(*(whole_run_rows(run_of(plan)) for plan in (before, after)), strict=True)
    changed = [(f"run's {name}", old, new) for (name, old), (_, new) in runs if old != new]
    rows = [*difference_rows(before, after, budget_tokens), *changed]
    typer.echo("what the change does" if rows else "the change makes no difference")
    if rows:
        changes = [(name, f"{old} -> {new}") for name, old, new in rows]
        show_table([("what", "before -> after"), *changes], width=_WIDTH)


def show_table(
    rows: Sequence[Sequence[str]], *, err: bool = False, width: int | None = None
) -> None:
    """Columns as wide as their widest cell, the last one free, or wrapped to `width`."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    if width is not None:
        # A path among the values must not push all reasons to the right.
        widths = [widths[0], *(min(size, _WIDEST) for size in widths[1:])]
    for row in rows:
        cells = [f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)]
        line = "  " + "  ".join(cells).rstrip()
        if width is None or len(line) <= width:
            typer.echo(line, err=err)
            continue
        head = "  " + "  ".join(cells[:-1])
        for part in _wrapped(head, row[-1], width):
            typer.echo(part, err=err)


def _wrapped(head: str, last: str, width: int) -> list[str]:
    """The last cell under its own beginning, or on lines of its own where it begins far right."""
    start = len(head) + 2
    if start > _FAR:
        words = wrap(last, width, initial_indent=" " * 6, subsequent_indent=" " * 6,
                     break_long_words=False, break_on_hyphens=False)  # fmt: skip
        return [head.rstrip(), *words]
    words = wrap(last, width - start, break_long_words=False, break_on_hyphens=False)
    return [f"{head}  {words[0]}", *(" " * start + word for word in words[1:])]


def show_warnings(plan: Plan) -> None:
    """What the planner could not make safe."""
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
