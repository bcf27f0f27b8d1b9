"""When a run worked, saved, failed and came back: one lane for each run, over wall-clock time.

Positions are percentages, so the timeline is as wide as the screen and its letters keep their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.report.axis import Axis
from shardwise.report.collect import RunRecord
from shardwise.report.late import stretches_of
from shardwise.report.markup import Html, tag
from shardwise.report.plots import colour_class
from shardwise.report.values import Event, number, of_kind, plain, whole
from shardwise.units import format_duration

# What is shown of every kind of event: its shape, and its name in the legend.
SHAPES = {
    "start": ("start", "start"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "eval": ("eval", "evaluation"),
    "restart": ("restart", "restart"),
    "rollback": ("restart", "restart"),
    "stopped": ("stop", "stopped"),
    "end": ("end", "end"),
    "checkpoint_failed": ("alert", "alert"),
    "checkpoint_damaged": ("alert", "alert"),
    "nonfinite": ("alert", "alert"),
    "sink_failed": ("alert", "alert"),
    "straggler": ("alert", "alert"),
}
# A save often follows an evaluation at once.
_HEIGHTS = {"eval": 20, "checkpoint": 31}
_LANE, _TOP, _AXIS = 46, 4, 26
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_S = 86400


def draw_timeline(runs: Sequence[RunRecord]) -> Html:
    """All runs, each from its own beginning on."""
    lanes = [(run, run.times()) for run in runs if run.times()]
    if not lanes:
        return tag("p", "nothing has happened yet", class_="empty")
    longest = max(max(times) - times[0] for _, times in lanes)
    across = Axis(0.0, max(longest, 1.0), 1.5, 98.5)
    bottom = _TOP + _LANE * len(lanes)
    drawn = [_lane(run, at, across) for at, run in enumerate(runs) if run.times()]
    shapes = {SHAPES[event["event"]] for run in runs for event in _shown(run)}
    svg = tag(
        "svg",
        tag("title", "Time line"),
        *_ticks(across, bottom),
        *(
            tag("svg", lane, y=_TOP + _LANE * at, width="100%", height=_LANE, overflow="visible")
            for at, lane in enumerate(drawn)
        ),
        id="timeline",
        role="img",
        width="100%",
        height=bottom + _AXIS,
        data_points=sum(len(_shown(run)) for run in runs),
    )
    keys = [tag("li", _symbol(shape), name) for shape, name in sorted(shapes)]
    return tag("figure", svg, tag("ul", *keys, class_="key"), class_="timeline")


def _lane(run: RunRecord, colour: int, across: Axis) -> Html:
    begin = run.times()[0]
    bars = [
        tag(
            "rect",
            tag("title", f"{run.name}: at work for {format_duration(last - first)}"),
            class_="work",
            x=_percent(across.place(first - begin)),
            width=_percent(max(0.2, across.place(last - begin) - across.place(first - begin))),
            y=24,
            height=8,
        )
        for first, last in spans_of(run)
    ]
    signs = [
        tag(
            "svg",
            tag("title", describe(event)),
            _shape(SHAPES[event["event"]][0]),
            x=_percent(across.place(event["time"] - begin)),
            y=_HEIGHTS.get(event["event"], 28),
            overflow="visible",
            class_="sign",
        )
        for event in _shown(run)
    ]
    label = tag("text", run.name, class_="lane", x=_percent(across.start), y=15)
    return tag("g", label, *bars, *signs, class_=colour_class(colour))


def spans_of(run: RunRecord) -> list[tuple[float, float]]:
    """(begin, end) of every start. It ends with the last event before the next start."""
    spans: list[list[float]] = []
    under_way = has_begun = False
    for event in run.events:
        at, kind = number(event, "time"), event["event"]
        if at is None:
            continue
        # A start first says what data it has; one of another version may not.
        if kind == "data" or (kind == "start" and (has_begun or not under_way)):
            spans.append([at, at])
            under_way, has_begun = True, False
        # The launcher writes these two, when the ranks are gone.
        if under_way and kind not in ("restart", "gates"):
            spans[-1][1] = at
        has_begun = has_begun or kind == "start"
        under_way = under_way and kind != "restart"
    return [(first, last) for first, last in spans]


def describe(event: Event) -> str:
    """One event in words: its kind, its step, and whatever else it says."""
    step = whole(event, "step")
    place = f" at step {step}" if step is not None else ""
    rest = details(event)
    return f"{event['event'].replace('_', ' ')}{place}{f': {rest}' if rest else ''}"


def details(event: Event) -> str:
    """Every other field of an event, except those that the environment's table shows."""
    shown = ("event", "time", "step", "versions", "environment")
    fields = {key: value for key, value in event.items() if key not in shown}
    return "; ".join(
        f"{key.replace('_', ' ')}: {plain(value)}"
        for key, value in fields.items()
        if value not in (None, "", [], {})
    )


def _shown(run: RunRecord) -> list[Event]:
    found = [*of_kind(run.events, *SHAPES), *stretches_of(run)]
    return [event for event in found if number(event, "time") is not None]


def _ticks(across: Axis, bottom: int) -> Iterator[Html]:
    step = _tick_step(across.high / 5)
    for count in range(int(across.high / step) + 1):
        x = across.place(count * step)
        anchor = "start" if x < 4 else "end" if x > 94 else "middle"
        yield tag("line", class_="grid", x1=_percent(x), x2=_percent(x), y1=_TOP, y2=bottom)
        label = _short(count * step)
        yield tag("text", label, class_="tick", x=_percent(x), y=bottom + 16, text_anchor=anchor)


def _tick_step(raw: float) -> float:
    days = -(-raw // _DAY_S) * _DAY_S
    return next((float(step) for step in _STEPS_S if step >= raw), days)


def _short(seconds: float) -> str:
    """5400 -> '1h30m'; 7200 -> '2h'."""
    text = format_duration(seconds)
    for tail in ("00s", "00m", "00h"):
        if len(text) > len(tail):
            text = text.removesuffix(tail)
    return text


def _symbol(shape: str) -> Html:
    return tag("svg", _shape(shape), viewBox="-7 -7 14 14", class_="sign", width=14, height=14)


def _shape(shape: str) -> Html:
    """Shapes differ as well as colours."""
    paths = {
        "start": "M-4 -6L6 0L-4 6Z",
        "checkpoint": "M0 -6L5 4H-5Z",
        "eval": "M0 -5L5 0L0 5L-5 0Z",
        "restart": "M-5 -5H5V5H-5Z",
        "stop": "M-5 -5H-1V5H-5ZM1 -5H5V5H1Z",
        # Beside the last save, which comes at the same moment.
        "end": "M5 -8H8V8H5Z",
        "alert": "M-5 -5L5 5M5 -5L-5 5",
    }
    return tag("path", d=paths[shape], class_=f"shape {shape}")


def _percent(place: float) -> str:
    return f"{place:.3f}%"
