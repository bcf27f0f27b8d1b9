"""The tables of runs: plan beside measurement, gates, checkpoints, environment, happenings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardwise.metrics.verdict import MEMORY_BAND, SPEED_BAND, plan_misses
from shardwise.plan.planned import Plan
from shardwise.plan.stage_rows import first_rank_memory
from shardwise.report.bars import share_bar
from shardwise.report.collect import RunRecord
from shardwise.report.curves import row_name, rows_of
from shardwise.report.markup import Html, table, tag
from shardwise.report.timeline import details
from shardwise.report.values import (
    Event,
    clock,
    number,
    of_kind,
    percent,
    plain,
    short_seconds,
    whole,
)
from shardwise.units import format_bytes, format_count, format_duration

# Kinds of events that have a plot or a table of their own.
_SHOWN_ELSEWHERE = {"step", "eval", "data", "checkpoint", "collectives", "goodput", "gates"}
_SHOWN_ELSEWHERE |= {"profile", "pipeline"}
_MOST_ROWS = 200


def forecast_table(run: RunRecord, plan: Plan) -> Html:
    """Plan, measurement, and how far they are apart."""
    forecast = plan.forecast
    rows = [
        _compare(
            "tok/s per device",
            forecast.tokens_per_s if forecast else None,
            median_of(run, "tokens_per_s"),
            SPEED_BAND,
            format_count,
        ),
        _compare(
            "step",
            forecast.step_s if forecast else None,
            median_of(run, "step_s"),
            SPEED_BAND,
            short_seconds,
        ),
        _compare(
            "mfu",
            forecast.mfu if forecast else None,
            median_of(run, "efficiency", "mfu"),
            SPEED_BAND,
            percent,
        ),
    ]
    held, reserved = last_of(run, "memory", "allocated"), last_of(run, "memory", "reserved")
    what = "resident memory"  # the one figure of a CPU, which no verdict judges
    if plan.cluster.device == "cuda":
        what, allocated = "memory reserved", first_rank_memory(plan).allocated
        rows.append(_compare("memory allocated", allocated, held, MEMORY_BAND, format_bytes))
    rows.append(_compare(what, plan.peak_bytes, reserved, None, format_bytes))
    head = ("", "plan", "measured", "apart", "band")
    return table(head, rows, numbers=(1, 2, 3, 4))


def misses_of(run: RunRecord) -> list[str]:
    """What is outside its band, in words."""
    steps = [event for event in run.steady if _is_judged(event)]
    if run.plan is None or not steps:
        return []
    # The verdict skips the first step as warm-up; here that is done already.
    return list(plan_misses(run.plan, [steps[0], *steps]))


def gates_table(gates: Sequence[Mapping[str, object]]) -> Html:
    """Every gate."""
    rows = [
        (
            tag("span", plain(gate.get("verdict")), class_=f"verdict {_verdict(gate)}"),
            plain(gate.get("name")),
            plain(gate.get("figure")),
            plain(gate.get("bound")),
            gate.get("advice") or "",
        )
        for gate in gates
    ]
    head = ("verdict", "gate", "figure", "bound", "advice")
    return table(head, rows, stacked=True)


def collectives_table(event: Event) -> Html:
    """The newest latencies and rates."""
    rows = [
        (
            row_name(row),
            plain(row.get("count")),
            _shown(row, "p50_s", short_seconds),
            _shown(row, "p99_s", short_seconds),
            _shown(row, "bytes", format_bytes),
            _shown(row, "bus_bytes_per_s", lambda rate: f"{rate / 1e9:.3g} GB/s"),
            f"slowest: {row['slowest_unit']}" if row.get("slowest_unit") else "",
        )
        for row in rows_of(event)
    ]
    head = ("collective", "calls", "median", "p99", "bytes", "bus rate", "unit")
    return table(head, rows, numbers=range(1, 6), stacked=True)


def profile_table(event: Event) -> Html:
    """Where profiled steps went, and of each collective the part that no compute hid."""
    step_s = number(event, "step_s") or 0.0
    parts = [(part, number(event, f"{part}_share")) for part in _PARTS]
    rows: list[tuple[object, ...]] = [
        (_PARTS[part], "-", short_seconds(share * step_s), share_bar(share))
        for part, share in parts
        if share is not None
    ]
    for row in rows_of(event):
        seconds, exposed = number(row, "seconds"), number(row, "exposed_s")
        if seconds is not None and exposed is not None:
            calls = _shown(row, "calls", "{:.0f}".format)
            bare = f"{short_seconds(exposed)} of it exposed"
            rows.append((plain(row.get("name")), calls, short_seconds(seconds), bare))
    return table(("part of a step", "calls", "time", "share"), rows, numbers=(1, 2))


def axes_table(event: Event) -> Html:
    """What profiled steps moved along each axis of the mesh, beside the plan."""
    rows = [
        (
            plain(row.get("axis")),
            _shown(row, "calls", "{:.0f}".format),
            _shown(row, "num_bytes", format_bytes),
            _shown(row, "planned_bytes", format_bytes),
            _shown(row, "seconds", short_seconds),
            _shown(row, "exposed_s", short_seconds),
            _shown(row, "planned_s", short_seconds),
        )
        for row in rows_of(event, "axes")
    ]
    head = ("along", "calls", "a step", "plan", "time", "exposed", "links' time in the plan")
    return table(head, rows, numbers=range(1, 7), stacked=True)


_PARTS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "copies": "copies alone",
    "idle": "nothing at all",
}


def checkpoints_table(run: RunRecord) -> Html:
    """Every save that was reported, and every directory that is there."""
    saves: dict[int, Event] = {}
    for event in of_kind(run.events, "checkpoint", "checkpoint_failed"):
        step = whole(event, "step")
        if step is not None:
            saves[step] = event
    kept = {found.step: found for found in run.checkpoints}
    rows = []
    for step in sorted({*saves, *kept})[-_MOST_ROWS:]:
        save, found = saves.get(step, {}), kept.get(step)
        failed = save.get("event") == "checkpoint_failed"
        gone = "failed" if failed else "removed"
        state = found.state if found is not None else gone
        manifest = found.manifest if found is not None else None
        loss = manifest.loss if manifest is not None else None
        rows.append(
            (
                step,
                tag("span", state, class_=f"verdict {_STATE_STYLES.get(state, 'skip')}"),
                "-" if manifest is None else format_bytes(manifest.total_bytes),
                "-" if loss is None else f"{loss:.4f}",
                _shown(save, "stage_s", short_seconds),
                _shown(save, "write_s", short_seconds),
                (found.reason if found is not None else "") or save.get("error") or "",
            )
        )
    head = ("step", "state", "size", "loss", "waited", "written in", "reason")
    return table(head, rows, numbers=(0, 2, 3, 4, 5), stacked=True)


_STATE_STYLES = {
    "not verified": "pass",
    **dict.fromkeys(("damaged", "unreadable", "failed", "quarantined"), "fail"),
}


def happenings_table(run: RunRecord) -> Html:
    """Starts, restarts, alerts and whatever else was said, in order."""
    begin = run.times()[0] if run.times() else 0.0
    shown = [event for event in run.events if event["event"] not in _SHOWN_ELSEWHERE]
    rows = [
        (
            _since(event, begin),
            plain(whole(event, "step")),
            event["event"].replace("_", " "),
            details(event),
        )
        for event in shown[-_MOST_ROWS:]
    ]
    left_out = len(shown) - len(rows)
    note = tag("p", f"{left_out} earlier ones are left out", class_="note") if left_out else ""
    head = ("after", "step", "what", "details")
    return tag("div", note, table(head, rows, numbers=(0, 1), stacked=True))


def environment_rows(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Devices, versions, data: as far as plan, events and manifests tell."""
    if run.plan is not None:
        cluster = run.plan.cluster
        shape = f"{cluster.num_nodes} x {cluster.devices_per_node} {cluster.device_name}"
        yield "cluster", f"{cluster.name}: {shape}, {format_bytes(cluster.memory_bytes)} each"
    starts = of_kind(run.events, "start")
    sizes = dict.fromkeys(plain(start.get("world_size")) for start in starts)
    if sizes:
        yield "ranks", ", then ".join(sizes)
    versions: dict[str, object] = {}
    for found in run.checkpoints:
        versions |= found.manifest.versions if found.manifest is not None else {}
    for start in starts:
        for key in ("versions", "environment"):
            named = start.get(key)
            versions |= named if isinstance(named, dict) else {}
    yield from ((str(name), plain(version)) for name, version in versions.items())
    for data in of_kind(run.events, "data")[-1:]:
        yield "training tokens", _shown(data, "tokens", format_count)
        yield "tokenizer", plain(data.get("tokenizer"))
        if data.get("skipped"):
            yield "skipped records", plain(data["skipped"])
    if run.times():
        yield "first event", f"{clock(run.times()[0])} UTC"
        yield "last event", f"{clock(run.times()[-1])} UTC"


def median_of(run: RunRecord, *path: str) -> float | None:
    """The median over the steady steps, or over all steps where none is steady."""
    values = [number(event, *path) for event in run.steady or run.steps]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def last_of(run: RunRecord, *path: str) -> float | None:
    """At the last logged step."""
    return number(run.steps[-1], *path) if run.steps else None


def _compare(
    what: str,
    planned: float | None,
    measured: float | None,
    band: float | None,
    show: Callable[[float], str],
) -> tuple[object, ...]:
    apart: object = "-"
    if planned and measured is not None:
        miss = measured / planned - 1
        inside = band is None or abs(miss) <= band
        style = "skip" if band is None else "pass" if inside else "fail"
        apart = tag("span", f"{miss:+.1%}", class_=f"verdict {style}")
    return (
        what,
        "-" if planned is None else show(planned),
        "-" if measured is None else show(measured),
        apart,
        "-" if band is None else f"± {band:.0%}",
    )


def _shown(event: object, key: str, show: Callable[[float], str]) -> str:
    value = number(event, key)
    return "-" if value is None else show(value)


def _verdict(gate: Mapping[str, object]) -> str:
    word = str(gate.get("verdict"))
    return word if word in ("pass", "fail") else "skip"


def _is_judged(event: Event) -> bool:
    paths = (("tokens_per_s",), ("data_share",), ("memory", "allocated"))
    return all(number(event, *path) is not None for path in paths)


def _since(event: Event, begin: float) -> str:
    at = number(event, "time")
    return "-" if at is None else format_duration(at - begin)
