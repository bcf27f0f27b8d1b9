"""Where the time of a run went, as a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.metrics.goodput import productive_share
from shardwise.report.bars import draw_bar
from shardwise.report.collect import RunRecord
from shardwise.report.markup import Html, table, tag
from shardwise.report.values import percent
from shardwise.units import format_duration


def goodput_share(run: RunRecord) -> float | None:
    """The productive share of a run's time."""
    return None if run.spent is None else productive_share(run.spent)


def draw_spent(runs: Sequence[RunRecord]) -> Html:
    """One bar per run, and a table of the same figures."""
    found = [(run, spent) for run in runs if (spent := run.spent) is not None]
    if not found:
        return tag("p", "no steps were logged yet", class_="empty")
    kinds = list(found[0][1])
    bars = [_bar(run.name, spent, at) for at, (run, spent) in enumerate(found)]
    rows = [
        (
            tag("span", tag("i", class_=f"key area spent-{kind}"), f" {kind}"),
            *(f"{format_duration(s[kind])} ({_share(s, kind)})" for _, s in found),
        )
        for kind in kinds
    ]
    head = ("", *(run.name for run, _ in found))
    return tag("div", *bars, table(head, rows, name="goodput", numbers=range(1, len(head))))


def _bar(name: str, spent: Mapping[str, float], at: int) -> Html:
    total = sum(spent.values())
    parts = [
        (f"spent-{kind}", seconds / total, f"{name}: {kind} {format_duration(seconds)}")
        for kind, seconds in spent.items()
    ]
    label = tag("p", f"{name}: {percent(productive_share(spent))} productive", class_="bar")
    return tag("div", label, draw_bar(f"spent-{at}", parts), class_="spent")


def _share(spent: Mapping[str, float], kind: str) -> str:
    return percent(spent[kind] / sum(spent.values()))
