"""Bars: one of parts, from left to right, and one of a share."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.report.markup import Html, tag

_HEIGHT = 18


def draw_bar(name: str, parts: Iterable[tuple[str, float, str]]) -> Html:
    """One rectangle for each (class, share of the width, tooltip)."""
    begin, drawn = 0.0, []
    for kind, share, title in parts:
        place = {"x": f"{100 * begin:.3f}%", "width": f"{100 * share:.3f}%", "height": _HEIGHT}
        drawn.append(tag("rect", tag("title", title), class_=f"point {kind}", **place))
        begin += share
    return tag("svg", *drawn, id=name, role="img", width="100%", height=_HEIGHT)


def share_bar(share: float) -> Html:
    """A share as a bar, and as a number."""
    bar = tag("rect", width=f"{100 * min(1.0, share):.1f}%", height=8, y=2)
    svg = tag("svg", bar, class_="share", width=70, height=12, aria_hidden="true")
    return tag("span", svg, f" {share:.1%}", class_="share")
