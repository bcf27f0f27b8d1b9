"""When a rank held the others up: consecutive reports that name the same rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from shardwise.report.collect import RunRecord
from shardwise.report.values import Event, number, short_seconds, whole


def stretches_of(run: RunRecord) -> list[Event]:
    """One event per stretch: the rank, its first and last report, and its largest delay."""
    found = []
    for rank, members in groupby(run.history("collectives"), key=_late_rank):
        if rank is None:
            continue
        reports = list(members)
        behind = [number(each, "straggler", "behind_s") or 0.0 for each in reports]
        first, last = reports[0], reports[-1]
        named = {"rank": rank, "last_step": last["step"], "behind_s": max(behind)}
        found.append(
            {"event": "straggler", "time": first.get("time"), "step": first["step"]} | named
        )
    return found


def lines_of(run: RunRecord) -> Iterator[str]:
    """One line of text per stretch."""
    for each in stretches_of(run):
        steps = f"step {each['step']}"
        if each["last_step"] != each["step"]:
            steps = f"steps {each['step']} to {each['last_step']}"
        behind = short_seconds(each["behind_s"])
        yield f"rank {each['rank']} was up to {behind} per step behind the others ({steps})"


def _late_rank(event: Event) -> int | None:
    return whole(event, "straggler", "rank")
