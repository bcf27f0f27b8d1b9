"""The ranks of a pipeline: what the plan gave each of them, and what it did and held."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from shardwise.plan.stage_rows import PlannedRank, planned_bubble, planned_ranks
from shardwise.report.collect import RunRecord
from shardwise.report.curves import rows_of
from shardwise.report.markup import Html, join, table, tag
from shardwise.report.values import Event, number, percent, short_seconds
from shardwise.units import format_bytes


def stages_of(run: RunRecord) -> Html | None:
    """Each rank beside its plan, and the bubble; None without stages."""
    found = run.history("pipeline")
    newest = found[-1] if found else None
    has_stages = run.plan is not None and run.plan.decided.pipeline > 1
    if newest is None and not has_stages:
        return None
    head = ("stage", "has", "computes", "of the longest", "plan", "memory", "plan")
    rows = table(head, list(_rows(run, newest)), numbers=range(2, 7), stacked=True)
    return join([rows, tag("p", _bubble_of(run, newest), class_="note")])


def _rows(run: RunRecord, newest: Event | None) -> Iterator[tuple[object, ...]]:
    measured = rows_of(newest or {}, "stages")
    planned = planned_ranks(run.plan) if run.plan is not None else []
    longest = max((number(row, "busy_s") or 0.0 for row in measured), default=0.0)
    for rank, (row, plan) in enumerate(zip_longest(measured, planned)):
        busy, held = number(row, "busy_s"), number(row, "allocated")
        yield (
            rank,
            "-" if plan is None else plan.blocks,
            "-" if busy is None else f"{short_seconds(busy)} a step",
            percent(busy / longest if busy is not None and longest else None),
            percent(None if plan is None else plan.work),
            "-" if held is None else format_bytes(held),
            "-" if plan is None else format_bytes(_planned_bytes(run, plan)),
        )


def _planned_bytes(run: RunRecord, rank: PlannedRank) -> int:
    """What is measured as allocated: on a CPU that is all that the process holds."""
    on_gpu = run.plan is not None and run.plan.cluster.device == "cuda"
    return rank.memory.allocated if on_gpu else rank.memory.total


def _bubble_of(run: RunRecord, newest: Event | None) -> str:
    planned = planned_bubble(run.plan) if run.plan is not None else number(newest, "planned")
    share = (
        "not measured yet" if newest is None else f"{percent(number(newest, 'bubble'))} measured"
    )
    return f"bubble, of forwards and backwards: {share}, {percent(planned)} planned"
