"""Bars of parts below each other, and a limit that they should stay under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.report.axis import Axis, labels
from shardwise.report.markup import Html, tag
from shardwise.report.plots import WIDTH

_LEFT, _RIGHT, _TOP = 4, WIDTH - 10, 18
_ROW, _BAR = 34, 14
# Room for the total behind a bar.
_ROOM = 40


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar: (class, length) of its parts from left to right."""

    label: str
    parts: tuple[tuple[str, float], ...]
    total: str
    shown: str
    """What it says under the pointer."""

    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Stacks:
    """The bars, and a line that they should not reach."""

    name: str
    title: str
    bars: tuple[Stack, ...]
    limit: float
    limit_label: str


def draw_stacks(stacks: Stacks) -> Html:
    """The figure: caption, SVG, and what the chosen bar (or the one under the pointer) says."""
    longest = max(sum(length for _, length in bar.parts) for bar in stacks.bars)
    across = Axis(0.0, 1.02 * max(longest, stacks.limit), _LEFT, _RIGHT)
    bottom = _TOP + _ROW * len(stacks.bars)
    chosen = next((bar for bar in stacks.bars if bar.is_chosen), stacks.bars[0])
    svg = tag(
        "svg",
        tag("title", stacks.title),
        *_levels(across, bottom),
        *_limit(stacks, across, bottom),
        *(
            tag("g", *_bar(bar, _TOP + _ROW * row, across), class_="bar")
            for row, bar in enumerate(stacks.bars)
        ),
        id=f"plot-{stacks.name}",
        viewBox=f"0 0 {WIDTH} {bottom + 24}",
        role="img",
        data_points=len(stacks.bars),
        # Bars are found by their height.
        data_near="row",
    )
    caption = tag("figcaption", stacks.title)
    return tag("figure", caption, svg, tag("p", chosen.shown, class_="readout"), class_="plot")


def _levels(across: Axis, bottom: int) -> Iterator[Html]:
    levels = across.ticks(5)
    for level, label in zip(levels, labels(levels), strict=True):
        x = f"{across.place(level):.1f}"
        anchor = "middle" if level else "start"
        yield tag("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=bottom)
        yield tag("text", label, class_="tick", x=x, y=bottom + 16, text_anchor=anchor)


def _limit(stacks: Stacks, across: Axis, bottom: int) -> Iterator[Html]:
    x = f"{across.place(stacks.limit):.1f}"
    yield tag("line", class_="limit", x1=x, x2=x, y1=_TOP - 4, y2=bottom)
    yield tag("text", stacks.limit_label, class_="limit", x=x, y=_TOP - 7, text_anchor="end")


def _bar(bar: Stack, top: int, across: Axis) -> Iterator[Html]:
    style = "lane" if bar.is_chosen else None
    yield tag("text", bar.label, class_=style, x=_LEFT, y=top + 12)
    before = 0.0
    for kind, length in bar.parts:
        start, end = across.place(before), across.place(before + length)
        before += length
        size = {"x": f"{start:.2f}", "width": f"{end - start:.2f}"}
        yield tag("rect", class_=f"part {kind}", y=top + 16, height=_BAR, **size)
    end = across.place(before)
    inside = end > _RIGHT - _ROOM
    yield tag(
        "text",
        bar.total,
        class_="lane" if bar.is_chosen else "tick",
        x=f"{_RIGHT if inside else end + 5:.1f}",
        y=top + 12 if inside else top + 27,
        text_anchor="end" if inside else None,
    )
    yield tag(
        "rect",
        tag("title", bar.shown),
        class_="point row chosen" if bar.is_chosen else "point row",
        x=0,
        width=WIDTH,
        y=top + 1,
        height=_ROW,
    )
