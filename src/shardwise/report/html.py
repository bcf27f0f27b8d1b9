"""The report of runs: what stands on its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.plan.explain import headline
from shardwise.report import plan_tables, tables
from shardwise.report.collect import RunRecord, state_of
from shardwise.report.curves import collective_plot, plots_of
from shardwise.report.judged_gates import gates_of
from shardwise.report.late import lines_of
from shardwise.report.markup import Html, join, table, tag
from shardwise.report.page import PageKind, WebPage, render_page, section
from shardwise.report.plots import MAX_POINTS, colour_class, draw_plot
from shardwise.report.spent import draw_spent, goodput_share
from shardwise.report.stage_table import stages_of
from shardwise.report.timeline import draw_timeline
from shardwise.report.values import number, of_kind, percent, plain, short_seconds, whole
from shardwise.units import format_bytes, format_count

REPORT = PageKind("shardwise report", "a report", "--to")


def render_report(runs: Sequence[RunRecord], now: float, *, reload_s: float | None = None) -> str:
    """The whole page. With `reload_s` it reloads itself after so many seconds."""
    page = WebPage(
        title=" and ".join(run.name for run in runs),
        header=_header(runs, reload_s),
        sections=(drawn for _, drawn in sections_of(runs, [state_of(run, now) for run in runs])),
        reload_s=reload_s,
    )
    return render_page(REPORT, page, now)


def _header(runs: Sequence[RunRecord], reload_s: float | None) -> Iterator[Html]:
    yield tag("h1", *names_of(runs))
    yield from headlines_of(runs)
    if reload_s is not None:
        yield tag("p", f"live: read again every {reload_s:g} s", class_="note")


def headlines_of(runs: Sequence[RunRecord]) -> Iterator[Html]:
    """The plan of each run in a line, and what could not be read."""
    for run in runs:
        if run.plan is not None:
            whose = f"{run.name}: " if len(runs) > 1 else ""
            yield tag("p", f"{whose}{headline(run.plan)}", class_="headline")
    for run in runs:
        for note in run.notes:
            yield tag("p", f"{run.name}: {note}", class_="alert")


def names_of(runs: Sequence[RunRecord]) -> Iterator[Html]:
    """The runs' names, each with its colour where there are several."""
    for place, run in enumerate(runs):
        colour = tag("i", class_=f"key line {colour_class(place)}") if len(runs) > 1 else ""
        yield tag("span", colour, f" {run.name}")


def sections_of(
    runs: Sequence[RunRecord], states: Sequence[str], max_points: int = MAX_POINTS
) -> Iterator[tuple[str, Html]]:
    """(name, section) of everything that is told of these runs, each in its state."""
    for name, title, content in _contents_of(runs, states, max_points):
        yield name, section(name, title, content)


def _contents_of(
    runs: Sequence[RunRecord], states: Sequence[str], max_points: int
) -> Iterator[tuple[str, str, Html]]:
    yield "summary", "Summary", _summary(runs, states)
    plots = [draw_plot(plot) for plot in plots_of(runs, max_points)]
    yield "plots", "Measured beside planned", tag("div", *plots, class_="grid")
    yield "time", "Time line", draw_timeline(runs)
    if any(run.spent is not None for run in runs):
        yield "where", "Where the time went", draw_spent(runs)
    gates = [(run, gates_of(run)) for run in runs]
    if any(found for _, found in gates):
        gated = [(run, _gates(found)) for run, found in gates]
        yield "gates", "Gates", side_by_side(gated)
    if any(run.history("collectives") for run in runs):
        timed = [(run, _collectives(run, place)) for place, run in enumerate(runs)]
        yield "collectives", "Collectives", side_by_side(timed)
    if any(run.history("profile") for run in runs):
        profiled = [(run, _profile(run)) for run in runs]
        yield "profile", "Profile", side_by_side(profiled)
    staged = [(run, found) for run in runs if (found := stages_of(run)) is not None]
    if staged:
        yield "stages", "Stages", side_by_side(staged)
    yield "forecast", "Forecast", side_by_side([(run, _forecast(run)) for run in runs])
    if len(runs) > 1:
        yield "differences", "Where the plans differ", plan_tables.differences_table(runs)
    yield "plan", "Plan", side_by_side([(run, _plan(run)) for run in runs])
    kept = [(run, tables.checkpoints_table(run)) for run in runs]
    yield "checkpoints", "Checkpoints", side_by_side(kept)
    told = [(run, tables.happenings_table(run)) for run in runs]
    yield "happenings", "What happened", side_by_side(told)
    around = [(run, _environment(run)) for run in runs]
    yield "environment", "Environment", side_by_side(around)


def side_by_side(parts: Sequence[tuple[RunRecord, Html]]) -> Html:
    """One block per run, with the run's name where there are several."""
    if len(parts) == 1:
        return parts[0][1]
    blocks = [
        tag("div", tag("h3", *_label(run, place)), block, class_="block")
        for place, (run, block) in enumerate(parts)
    ]
    return tag("div", *blocks, class_="sides")


def _label(run: RunRecord, place: int) -> tuple[object, ...]:
    return tag("i", class_=f"key line {colour_class(place)}"), f" {run.name}"


def _summary(runs: Sequence[RunRecord], states: Sequence[str]) -> Html:
    columns = [list(_figures(run, state)) for run, state in zip(runs, states, strict=True)]
    if len(runs) == 1:
        tiles = [tag("div", tag("dt", what), tag("dd", figure)) for what, figure in columns[0]]
        return tag("dl", *tiles, class_="tiles")
    rows = [(parts[0][0], *(figure for _, figure in parts)) for parts in zip(*columns, strict=True)]
    return table(("", *(run.name for run in runs)), rows, name="summary-table")


def _figures(run: RunRecord, state: str) -> Iterator[tuple[str, str]]:
    """(what, figure): the same rows for every run."""
    step, total = tables.last_of(run, "step"), run.num_steps
    yield "state", state
    yield "steps", "-" if step is None else f"{step:.0f} of {total if total else '?'}"
    tokens = tables.last_of(run, "tokens")
    yield "tokens", "-" if tokens is None else format_count(tokens)
    yield "training loss", _from_to([number(event, "loss") for event in run.steps])
    yield "held-out loss", _from_to([number(event, "loss") for event in run.history("eval")])
    yield "best held-out loss", _best(run)
    speed = tables.median_of(run, "tokens_per_s")
    yield "median speed", "-" if speed is None else f"{format_count(speed)} tok/s per device"
    step_s = tables.median_of(run, "step_s")
    yield "median step", "-" if step_s is None else short_seconds(step_s)
    yield "median mfu", percent(tables.median_of(run, "efficiency", "mfu"))
    held = tables.last_of(run, "memory", "allocated")
    yield "peak memory", "-" if held is None else f"{format_bytes(held)} allocated"
    yield "goodput", percent(goodput_share(run))
    starts, restarts = (len(of_kind(run.events, kind)) for kind in ("start", "restart"))
    yield "starts", f"{starts}, {restarts} of them after a failure" if restarts else f"{starts}"
    good = sum(kept.checkpoint is not None for kept in run.checkpoints)
    yield "checkpoints", f"{good} whole of {len(run.checkpoints)}" if run.checkpoints else "none"


def _best(run: RunRecord) -> str:
    """The lowest held-out loss of the run, where it was, and whether that step was kept."""
    found = [event for event in run.history("eval") if event.get("best") is True]
    loss = number(found[-1], "loss") if found else None
    if loss is None:
        return "-"
    step = whole(found[-1], "step")
    is_kept = any(kept.checkpoint is not None and kept.step == step for kept in run.checkpoints)
    return f"{loss:.4f} at step {step}, {'kept' if is_kept else 'not kept'}"


def _from_to(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    if not known:
        return "-"
    return f"{known[0]:.4f} → {known[-1]:.4f}" if len(known) > 1 else f"{known[0]:.4f}"


def _gates(found: Sequence[Mapping[str, Any]]) -> Html:
    return tables.gates_table(found) if found else _nothing("nothing could be judged")


def _collectives(run: RunRecord, place: int) -> Html:
    found, plot = run.history("collectives"), collective_plot(run, str(place))
    if not found:
        return _nothing("no collectives were timed")
    drawn = draw_plot(plot) if plot is not None else ""
    newest = tables.collectives_table(found[-1])
    late = [tag("p", line, class_="alert") for line in lines_of(run)]
    return tag("div", drawn, tag("div", *late, newest), class_="pair")


def _profile(run: RunRecord) -> Html:
    found = run.history("profile")
    if not found:
        return _nothing("no step was profiled")
    trace = tag("p", f"from {plain(found[-1].get('trace'))}", class_="note")
    along = [tables.axes_table(found[-1])] if found[-1].get("axes") else []
    return join([tables.profile_table(found[-1]), *along, trace])


def _forecast(run: RunRecord) -> Html:
    plan = run.plan
    if plan is None:
        return _nothing("there is no plan to compare with")
    parts = [tables.forecast_table(run, plan)]
    parts += [tag("p", f"missed plan: {miss}", class_="alert") for miss in tables.misses_of(run)]
    if plan.forecast is not None:
        parts.append(plan_tables.terms_table(plan.forecast))
    parts.append(plan_tables.memory_table(plan))
    return tag("div", *parts, class_="flow")


def _plan(run: RunRecord) -> Html:
    plan = run.plan
    if plan is None:
        return _nothing("plan.json is missing or cannot be read")
    parts = [tag("p", warning, class_="alert") for warning in plan.warnings]
    parts.append(plan_tables.choices_table(plan))
    if plan.alternatives:
        others = plan_tables.alternatives_table(plan)
        parts.append(tag("details", tag("summary", "considered besides"), others, open=""))
    return join(parts)


def _environment(run: RunRecord) -> Html:
    rows = table((), list(tables.environment_rows(run)))
    if not run.config:
        return rows
    text = tag("details", tag("summary", "config.yaml"), tag("pre", run.config))
    return join([rows, text])


def _nothing(text: str) -> Html:
    return tag("p", text, class_="empty")
