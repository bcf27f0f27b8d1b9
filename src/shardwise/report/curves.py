"""What is plotted of a run: loss, speed, efficiency, memory and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shardwise.metrics.verdict import MEMORY_BAND, SPEED_BAND
from shardwise.plan.planned import Plan
from shardwise.plan.stage_rows import first_rank_memory
from shardwise.report.collect import RunRecord, first_of_starts
from shardwise.report.plots import MAX_POINTS, Band, Mark, Plot, PlotPoint, Series, thin
from shardwise.report.values import Event, number, of_kind, short_seconds, whole
from shardwise.units import GIB, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One figure of the step events, and what the plan said of it."""

    name: str
    title: str
    path: tuple[str, ...]
    show: Callable[[float], str]
    unit: float = 1.0
    """What a value is divided by to be on the axis."""

    planned: Callable[[Plan], float | None] = lambda plan: None
    share: float = SPEED_BAND
    warms: bool = False
    """Whether compilation and warm-up distort the first step of a start."""

    missing: str = ""
    """Why there may be nothing to plot."""

    is_optional: bool = False
    """Whether there is no plot where no run has the figure."""


CURVES = (
    Curve(name="loss", title="Loss", path=("loss",), show=lambda loss: f"{loss:.4f}"),
    Curve(
        name="accuracy",
        title="Answers told apart, %",
        path=("preference", "accuracy"),
        show=lambda share: f"{share:.1%}",
        unit=0.01,
        is_optional=True,
    ),
    Curve(
        name="margin",
        title="Margin of rewards",
        path=("preference", "margin"),
        show=lambda margin: f"{margin:.3f}",
        is_optional=True,
    ),
    Curve(
        name="speed",
        title="Tokens per second per device",
        path=("tokens_per_s",),
        show=lambda speed: f"{format_count(speed)} tok/s",
        planned=lambda plan: plan.forecast.tokens_per_s if plan.forecast else None,
        warms=True,
    ),
    Curve(
        name="mfu",
        title="MFU, % of the device's peak",
        path=("efficiency", "mfu"),
        show=lambda mfu: f"{mfu:.1%}",
        unit=0.01,
        planned=lambda plan: plan.forecast.mfu if plan.forecast else None,
        warms=True,
        missing="no MFU: the peak of this device is not known",
    ),
    Curve(
        name="memory",
        title="Peak memory allocated, GiB",
        path=("memory", "allocated"),
        show=lambda held: f"{held / GIB:.2f} GiB",
        unit=GIB,
        planned=lambda plan: planned_memory(plan),
        share=MEMORY_BAND,
    ),
    Curve(
        name="step-time",
        title="Seconds per step",
        path=("step_s",),
        show=short_seconds,
        planned=lambda plan: plan.forecast.step_s if plan.forecast else None,
        warms=True,
    ),
    Curve(
        name="gradient",
        title="Gradient norm",
        path=("grad_norm",),
        show=lambda norm: f"{norm:.3g}",
    ),
    Curve(
        name="data",
        title="Waiting for data, % of the time",
        path=("data_share",),
        show=lambda share: f"{share:.1%}",
        unit=0.01,
    ),
    Curve(name="lr", title="Learning rate", path=("lr",), show=lambda rate: f"{rate:.2e}"),
)


# The curves whose figures evaluations have as well.
_HELD_OUT = ("loss", "accuracy", "margin")


def planned_memory(plan: Plan) -> int:
    """What is measured as allocated: on a CPU that is all that the process holds."""
    on_gpu = plan.cluster.device == "cuda"
    return first_rank_memory(plan).allocated if on_gpu else plan.peak_bytes


def plots_of(runs: Sequence[RunRecord], limit: int = MAX_POINTS) -> Iterator[Plot]:
    """Every curve with all runs on it, each with at most `limit` points."""
    marks = tuple(mark for at, run in enumerate(runs) for mark in marks_of(run, at))
    alone = len(runs) == 1
    names = ["measured" if alone else run.name for run in runs]
    for curve in CURVES:
        series = [_series(curve, run, at, names[at], limit) for at, run in enumerate(runs)]
        if curve.name in _HELD_OUT:
            held_out = ["held-out" if alone else f"{run.name} held-out" for run in runs]
            series += [_held_out(curve, run, at, held_out[at]) for at, run in enumerate(runs)]
        found = tuple(line for line in series if line.points)
        if curve.is_optional and not found:
            continue
        yield Plot(
            name=curve.name,
            title=curve.title,
            series=found,
            bands=tuple(_bands(curve, runs)),
            marks=marks,
            note="" if found else curve.missing,
        )


def collective_plot(run: RunRecord, name: str) -> Plot | None:
    """The median latency of every kind of collective over the steps; None where none was timed."""
    events = run.history("collectives")
    kinds: dict[str, list[PlotPoint]] = {}
    for event in events:
        for row in rows_of(event):
            seconds, step = number(row, "p50_s"), whole(event, "step")
            if seconds is None or step is None:
                continue
            kinds.setdefault(row_name(row), []).append(
                PlotPoint(step, seconds * 1e3, short_seconds(seconds))
            )
    if not kinds:
        return None
    lines = enumerate(sorted(kinds.items()))
    return Plot(
        name=f"collectives-{name}",
        title="Collectives, median latency in ms",
        series=tuple(Series(name=kind, points=tuple(at), colour=c) for c, (kind, at) in lines),
    )


def rows_of(event: Event, key: str = "rows") -> list[Mapping[str, object]]:
    """The rows of a collectives or profile event that are rows."""
    rows = event.get(key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def row_name(row: Mapping[str, object]) -> str:
    """`all_gather forward`."""
    return " ".join(str(row[key]) for key in ("kind", "phase") if row.get(key)) or "?"


def marks_of(run: RunRecord, colour: int) -> Iterator[Mark]:
    """Checkpoints that were published, and the steps at which the run was taken up again."""
    for event in run.history("checkpoint"):
        text = f"{run.name}: checkpoint of step {event['step']}"
        yield Mark(x=event["step"], kind="checkpoint", colour=colour, text=text)
    for event in of_kind(run.events, "resume", "rollback"):
        step = whole(event, "step")
        if step is not None:
            text = f"{run.name}: {event['event']} at step {step}"
            yield Mark(x=step, kind="restart", colour=colour, text=text)


def _series(curve: Curve, run: RunRecord, colour: int, name: str, limit: int) -> Series:
    first = first_of_starts(run.events) if curve.warms else set()
    found = [
        (event, value) for event in run.steps if (value := number(event, *curve.path)) is not None
    ]
    points = tuple(
        PlotPoint(event["step"], value / curve.unit, curve.show(value), id(event) in first)
        for event, value in thin(found, limit, itemgetter(1))
    )
    return Series(name=name, points=points, colour=colour, measured=len(found))


def _held_out(curve: Curve, run: RunRecord, colour: int, name: str) -> Series:
    points = [
        PlotPoint(event["step"], value / curve.unit, curve.show(value))
        for event in run.history("eval")
        if (value := number(event, *curve.path)) is not None
    ]
    return Series(name=name, points=tuple(points), colour=colour, dashed=True)


def _bands(curve: Curve, runs: Sequence[RunRecord]) -> Iterator[Band]:
    """One band per run. Runs with the same plan share it."""
    planned_by = {
        planned: (colour, run.name)
        for colour, run in reversed([*enumerate(runs)])
        if run.plan is not None and (planned := curve.planned(run.plan)) is not None
    }
    for planned, (colour, run_name) in sorted(planned_by.items(), key=lambda item: item[1][0]):
        whose = f" of {run_name}" if len(planned_by) > 1 else ""
        name = f"plan{whose} {curve.show(planned)} ± {curve.share:.0%}"
        at = planned / curve.unit
        yield Band(planned=at, share=curve.share, colour=colour, name=name)
