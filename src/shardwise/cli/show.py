"""A plan on the terminal."""

from __future__ import annotations

import typer

from shardwise.plan.explain import choice_rows, headline, memory_rows
from shardwise.plan.plan import Plan


def show_plan(plan: Plan) -> None:
    """Headline, decisions with reasons, memory of one rank."""
    typer.echo(headline(plan))
    rows = choice_rows(plan)
    names = max(len(row[0]) for row in rows)
    values = max(len(row[1]) for row in rows)
    for name, value, source, why in rows:
        typer.echo(f"  {name:<{names}}  {value:<{values}}  {source:<4}  {why}")
    typer.echo("memory of one rank at the peak, expected")
    for name, amount in memory_rows(plan):
        typer.echo(f"  {name:<{names}}  {amount}")
    show_warnings(plan)


def show_warnings(plan: Plan) -> None:
    """What the planner could not make safe."""
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
