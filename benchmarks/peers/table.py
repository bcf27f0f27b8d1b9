"""Runs as rows, the best of each contender, and the tables that the documentation shows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.shapes import SHAPES

_HEAD = (
    "| shape | runs as | precision | contender | setting | tok/s | MFU | of limit | allocated GiB "
    "| reserved GiB | ours ÷ it |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender with one setting on one shape, over all rounds."""

    shape: str
    precision: str
    contender: str
    setting: str
    tokens_per_s: float = 0.0
    """The median of the rounds; 0 where no round measured anything."""

    spread: float | None = None
    """Of the rounds, as a share of the slowest; None of one."""

    mfu: float | None = None
    limit_share: float | None = None
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    problem: str = ""


def rows_of(runs: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rounds of each setting put together, in the order in which they first ran."""
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["shape"], run["precision"], run["contender"], run["setting"]].append(run)
    return [_row(key, group) for key, group in groups.items()]


def _row(key: tuple[str, str, str, str], runs: Sequence[Mapping[str, Any]]) -> Row:
    shape, precision, contender, setting = key
    speeds = [run["tokens_per_s"] for run in runs if not run["problem"]]
    problem = next((run["problem"] for run in runs if run["problem"]), "")
    names: dict[str, Any] = {"shape": shape, "precision": precision}
    names |= {"contender": contender, "setting": setting}
    if not speeds:
        return Row(**names, problem=problem)
    speed = statistics.median(speeds)
    last = next(run for run in reversed(runs) if not run["problem"])
    limit, ratio = last["limit_tokens_per_s"], speed / last["tokens_per_s"]
    return Row(
        **names,
        tokens_per_s=speed,
        spread=max(speeds) / min(speeds) - 1 if len(speeds) > 1 else None,
        mfu=None if last["mfu"] is None else last["mfu"] * ratio,
        limit_share=None if limit is None else speed / limit,
        allocated_gib=max(run["allocated_gib"] for run in runs if not run["problem"]),
        reserved_gib=max(run["reserved_gib"] for run in runs if not run["problem"]),
        problem=problem,
    )


def best_rows(rows: Sequence[Row], cap_gib: float = float("inf")) -> list[Row]:
    """The fastest setting of each contender that reserves no more than the cap.

    By shape and precision: a float8 run is no answer to a bf16 one.
    """
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.shape, row.precision, row.contender)
        fits = row.tokens_per_s > 0 and row.reserved_gib <= cap_gib
        if fits and (key not in best or row.tokens_per_s > best[key].tokens_per_s):
            best[key] = row
    shapes = list(dict.fromkeys(row.shape for row in rows))
    return sorted(
        best.values(), key=lambda row: (shapes.index(row.shape), row.precision, row.contender)
    )


def markdown(data: Mapping[str, Any]) -> str:
    """All tables of a file of results."""
    rows = rows_of(data["runs"])
    parts = [_machine_line(data), "Best setting of each:", _table(best_rows(rows))]
    if capped := best_rows(rows, data["cap_gib"]):
        title = f"Best setting of each that reserves at most {data['cap_gib']:g} GiB:"
        parts += [title, _table(capped)]
    return "\n\n".join([*parts, "All settings:", _all_table(rows)])


def _machine_line(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    words = (f"{name} {value}" for name, value in machine.items() if value is not None)
    return f"{', '.join(words)}; medians of {data['steps']} steps, settings in turn"


def _table(rows: Sequence[Row]) -> str:
    ours = {(row.shape, row.precision): row for row in rows if row.contender == "ours"}
    lines = [_HEAD, _rule(_HEAD)]
    for row in rows:
        mine = ours.get((row.shape, row.precision))
        ratio = f"{mine.tokens_per_s / row.tokens_per_s:.3f}" if mine else "-"
        lines.append(f"| {' | '.join([*_names(row), *_figures(row), ratio])} |")
    return "\n".join(lines)


def _all_table(rows: Sequence[Row]) -> str:
    head = _HEAD.replace("ours ÷ it", "rounds apart | failed")
    lines = [head, _rule(head)]
    for row in rows:
        figures = [*_figures(row), _share(row.spread)] if row.tokens_per_s else ["-"] * 6
        problem = row.problem.replace("|", "/")
        lines.append(f"| {' | '.join([*_names(row), *figures, problem])} |")
    return "\n".join(lines)


def _names(row: Row) -> list[str]:
    world = SHAPES[row.shape].world
    runs_as = f"one GPU as rank 0 of {world}, links take no time" if world > 1 else "one GPU"
    return [row.shape, runs_as, row.precision, row.contender, row.setting]


def _figures(row: Row) -> list[str]:
    return [
        f"{row.tokens_per_s:,.0f}",
        _share(row.mfu),
        _share(row.limit_share),
        f"{row.allocated_gib:.1f}",
        f"{row.reserved_gib:.1f}",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rule(head: str) -> str:
    return "|" + "---|" * (head.count("|") - 1)
