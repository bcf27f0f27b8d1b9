"""The tables of plans: decisions, alternatives, and what a step and the memory are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.plan.explain import alternative_rows, choice_rows
from shardwise.plan.planned import MEMORY_PARTS, Forecast, Plan
from shardwise.report.bars import share_bar
from shardwise.report.collect import RunRecord
from shardwise.report.markup import Html, table, tag
from shardwise.report.values import short_seconds
from shardwise.units import format_bytes


def choices_table(plan: Plan) -> Html:
    """Every decision with its reason."""
    head = ("decision", "value", "by", "why")
    return table(head, choice_rows(plan), stacked=True)


def alternatives_table(plan: Plan) -> Html:
    """What else was considered."""
    head = ("plan", "tok/s", "memory", "why not")
    rows = alternative_rows(plan, len(plan.alternatives))
    return table(head, rows, numbers=(1, 2), stacked=True)


def differences_table(runs: Sequence[RunRecord]) -> Html:
    """The decisions in which the plans of several runs differ."""
    planned = [run for run in runs if run.plan is not None]
    columns = [dict(_decisions(run.plan)) for run in planned if run.plan is not None]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    unlike = [row for row in rows if len(set(row[1:])) > 1]
    if not unlike:
        return tag("p", "the plans of these runs are the same", class_="empty")
    return table(("decision", *(run.name for run in planned)), unlike)


def terms_table(forecast: Forecast) -> Html:
    """What a step is expected to be spent on."""
    terms = [(name, s) for name, s in forecast.terms.items() if s > 0]
    rows = [
        (name.replace("_", " "), short_seconds(s), share_bar(s / forecast.step_s))
        for name, s in sorted(terms, key=lambda term: -term[1])
    ]
    return table(("part of a step", "plan", "share"), rows, numbers=(1,))


def memory_table(plan: Plan) -> Html:
    """What one rank is expected to hold at the peak, by class."""
    memory, capacity = plan.memory, plan.cluster.memory_bytes
    parts = [(name, getattr(memory, name)) for name in MEMORY_PARTS]
    rows: list[tuple[object, ...]] = [
        (name, format_bytes(size), share_bar(size / capacity)) for name, size in parts if size
    ]
    total = (tag("b", "total"), tag("b", format_bytes(memory.total)))
    rows.append((*total, share_bar(memory.total / capacity)))
    return table((f"at the peak, in the {memory.peak}", "plan", "of a device"), rows, numbers=(1,))


def _decisions(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model.name
    yield "cluster", plan.cluster.name
    for name, value, _, _ in choice_rows(plan):
        yield name, value
