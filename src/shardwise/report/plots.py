"""A plot as inline SVG: axes, lines, the plan's band, marks, and a tooltip on every point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

from shardwise.report.axis import Axis, axis_of, labels
from shardwise.report.markup import Html, tag

# Plots are drawn one to one on a phone, so letters keep their size. Wide screens get more columns.
WIDTH, HEIGHT = 360, 225
_RIGHT, _TOP, _BOTTOM = 352, 10, 191
# How wide a digit is, at the size of labels.
_DIGIT = 6.9
# More points than this a line are thinned: a pixel shows no more than one.
MAX_POINTS = 600
NUM_COLOURS = 6
_NUM_TICKS = 5
_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One measurement."""

    x: float
    y: float
    shown: str
    """The value with its unit, for the tooltip."""

    warming: bool = False
    """Whether it is the first of a start, with warm-up and compilation. The axis ignores it."""

    where: str = ""
    """What x is, in words; the step where it is not said."""

    is_chosen: bool = False
    """Whether it is the plan's own. It is drawn larger, and the keyboard begins there."""

    @property
    def place(self) -> str:
        """What x is, in words."""
        return self.where or f"step {self.x:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line."""

    name: str
    points: tuple[PlotPoint, ...]
    colour: int
    dashed: bool = False
    joined: bool = True
    """Whether a line joins the points."""

    measured: int = 0
    """How many points there were, where some are left out already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What the plan says, and how far from it a measurement may be."""

    planned: float
    share: float
    colour: int
    name: str

    @property
    def low(self) -> float:
        """The lower edge of the band."""
        return self.planned * (1 - self.share)

    @property
    def high(self) -> float:
        """The upper edge of the band."""
        return self.planned * (1 + self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a step, a `checkpoint` or a `restart`; or a `limit`."""

    x: float
    kind: str
    colour: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Everything on one pair of axes."""

    name: str
    """Stable: the SVG's id is `plot-NAME`."""

    title: str
    series: tuple[Series, ...]
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    note: str = ""
    across: str = "step"
    """What x is."""

    ticks: tuple[tuple[float, str], ...] = ()
    """Labels at values of x; without them there are round numbers."""

    from_zero: bool = False
    """Whether the upward axis begins at zero."""


def draw_plot(plot: Plot) -> Html:
    """The figure: caption, SVG, the last value (or the one under the pointer), legend, note."""
    thinned = [(series, thin(series.points)) for series in plot.series]
    if not any(points for _, points in thinned):
        reason = plot.note or "nothing was measured yet"
        empty = tag("p", reason, class_="empty", id=f"plot-{plot.name}", data_points=0)
        return tag("figure", tag("figcaption", plot.title), empty, class_="plot")
    measured = sum(max(series.measured, len(series.points)) for series in plot.series)
    drawn = sum(len(points) for _, points in thinned)
    notes = [plot.note] if plot.note else []
    if drawn < measured:
        notes.append(f"{drawn} of {measured} points are drawn, the extremes among them")
    return tag(
        "figure",
        tag("figcaption", plot.title),
        _svg(plot, thinned, drawn),
        tag("p", _last_values(plot), class_="readout"),
        _legend(plot),
        *(tag("p", note, class_="note") for note in notes),
        class_="plot",
    )


def thin(
    points: Sequence[_Point],
    limit: int = MAX_POINTS,
    height: Callable[[_Point], float] = attrgetter("y"),
) -> Sequence[_Point]:
    """At most `limit` points: of every stretch the lowest and the highest, in order; and the
    newest."""
    if len(points) <= limit:
        return points
    num_parts = (limit - 1) // 2
    newest = len(points) - 1
    edges = [newest * part // num_parts for part in range(num_parts + 1)]
    heights = [height(point) for point in points]
    kept: list[_Point] = []
    for first, last in pairwise(edges):
        part = range(first, last)
        extremes = {min(part, key=heights.__getitem__), max(part, key=heights.__getitem__)}
        kept += [points[place] for place in sorted(extremes)]
    return [*kept, points[newest]]


def _svg(plot: Plot, thinned: Sequence[tuple[Series, Sequence[PlotPoint]]], drawn: int) -> Html:
    points = [point for _, found in thinned for point in found]
    # Warm-up would flatten everything else; without anything else it is all there is.
    ordinary = [point.y for point in points if not point.warming] or [point.y for point in points]
    limits = [edge for band in plot.bands for edge in (band.low, band.high)]
    zero = [0.0] if plot.from_zero else []
    upward = axis_of([*zero, *ordinary, *limits], _BOTTOM, _TOP)
    left = 8 + _DIGIT * max(map(len, labels(upward.ticks(_NUM_TICKS))))
    marked = [mark.x for mark in plot.marks if mark.kind == "limit"]
    labelled = [x for x, _ in plot.ticks]
    values = [*(point.x for point in points), *marked, *labelled]
    across = axis_of(values, left, _RIGHT, room=0.02)
    return tag(
        "svg",
        tag("title", plot.title),
        *_grid(plot, across, upward),
        *(_draw_band(band, across, upward) for band in plot.bands),
        *(_draw_mark(mark, across) for mark in plot.marks if across.holds(mark.x)),
        *(_draw_series(series, found, across, upward) for series, found in thinned),
        id=f"plot-{plot.name}",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        data_points=drawn,
        # Where nothing joins the points, the height says which one is meant as much as the place.
        data_near=None if all(series.joined for series in plot.series) else "point",
    )


def _grid(plot: Plot, across: Axis, upward: Axis) -> Iterator[Html]:
    left, levels = across.start, upward.ticks(_NUM_TICKS)
    for level, label in zip(levels, labels(levels), strict=True):
        y = _at(upward.place(level))
        yield tag("line", class_="grid", x1=_at(left), x2=_RIGHT, y1=y, y2=y)
        yield tag(
            "text", label, class_="tick", x=_at(left - 5), y=y, dy="0.35em", text_anchor="end"
        )
    steps = across.ticks(_NUM_TICKS, whole=True)
    for step, label in plot.ticks or zip(steps, labels(steps), strict=True):
        x = _at(across.place(step))
        yield tag("line", class_="grid", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4)
        yield tag("text", label, class_="tick", x=x, y=_BOTTOM + 16, text_anchor="middle")
    yield tag("line", class_="axis", x1=_at(left), x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM)
    middle = (left + _RIGHT) / 2
    yield tag("text", plot.across, class_="tick", x=_at(middle), y=HEIGHT - 4, text_anchor="middle")


def _draw_band(band: Band, across: Axis, upward: Axis) -> Html:
    left = across.start
    top, bottom, y = (upward.place(value) for value in (band.high, band.low, band.planned))
    return tag(
        "g",
        tag("title", band.name),
        tag("rect", x=_at(left), width=_at(_RIGHT - left), y=_at(top), height=_at(bottom - top)),
        tag("line", x1=_at(left), x2=_RIGHT, y1=_at(y), y2=_at(y)),
        class_=f"band {colour_class(band.colour)}",
    )


def _draw_mark(mark: Mark, across: Axis) -> Html:
    x = across.place(mark.x)
    if mark.kind in ("restart", "limit"):
        shape = tag("line", x1=_at(x), x2=_at(x), y1=_TOP, y2=_BOTTOM)
    else:
        shape = tag("path", d=f"M{_at(x)} {_BOTTOM - 7}l4 7h-8z")
    kind = f"mark {mark.kind} {colour_class(mark.colour)}"
    return tag("g", tag("title", mark.text), shape, class_=kind)


def _draw_series(series: Series, points: Sequence[PlotPoint], across: Axis, upward: Axis) -> Html:
    places = [(_at(across.place(point.x)), _at(upward.place(point.y))) for point in points]
    inside = [place for point, place in zip(points, places, strict=True) if upward.holds(point.y)]
    # A line at the edge of the axis would say that the value stays there.
    path = "M" + "L".join(f"{x} {y}" for x, y in inside or places)
    radius = 2.4 if len(points) <= 80 else 1.4
    circles = [
        tag(
            "circle",
            tag("title", _tooltip(series, point, upward)),
            class_=_point_class(point, upward),
            cx=x,
            cy=y,
            r=2 * radius if point.is_chosen else radius,
        )
        for point, (x, y) in zip(points, places, strict=True)
    ]
    kind = f"series {_look(series)}"
    line = tag("path", d=path) if series.joined else ""
    return tag("g", line, *circles, class_=kind)


def _point_class(point: PlotPoint, upward: Axis) -> str:
    beyond = "" if upward.holds(point.y) else " beyond"
    return f"point{beyond}{' chosen' if point.is_chosen else ''}"


def _tooltip(series: Series, point: PlotPoint, upward: Axis) -> str:
    beyond = "" if upward.holds(point.y) else ", beyond the axis"
    warming = ", the first of a start" if point.warming else ""
    return f"{series.name}, {point.place}: {point.shown}{warming}{beyond}"


def _last_values(plot: Plot) -> str:
    own = [(each, at) for each in plot.series for at in each.points if at.is_chosen]
    last = own or [(each, each.points[-1]) for each in plot.series if each.points]
    return "; ".join(f"{series.name}, {at.place}: {at.shown}" for series, at in last)


def _legend(plot: Plot) -> Html:
    """The meaning of colours and shapes, where there is more than one."""
    items = [
        (f"{'line' if series.joined else 'dot'} {_look(series)}", series.name)
        for series in plot.series
        if series.points
    ]
    items += [(f"area {colour_class(band.colour)}", band.name) for band in plot.bands]
    kinds = {mark.kind for mark in plot.marks}
    items += [(kind, kind) for kind in ("checkpoint", "restart", "limit") if kind in kinds]
    if len(items) < 2:
        return Html("")
    return tag(
        "ul", *(tag("li", tag("i", class_=f"key {key}"), name) for key, name in items), class_="key"
    )


def _look(series: Series) -> str:
    return f"{colour_class(series.colour)}{' dashed' if series.dashed else ''}"


def colour_class(colour: int) -> str:
    """The CSS class of one run's lines and marks."""
    return f"c{colour % NUM_COLOURS}"


def _at(place: float) -> str:
    """A coordinate to a tenth, without needless digits."""
    return f"{place:.1f}".removesuffix(".0")
