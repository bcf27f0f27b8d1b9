"""Every option of a search by speed and memory, with the reason why each lost."""

from __future__ import annotations

from shardwise.plan.search import Option, fits, why_not
from shardwise.plan.searched import Searched
from shardwise.report.markup import Html
from shardwise.report.plots import Mark, Plot, PlotPoint, Series, draw_plot
from shardwise.units import GIB, format_bytes

# Of what does not fit, only what comes near: the rest would press all others together.
_NEAR = 1.5


def draw_frontier(searched: Searched) -> Html:
    """The picture, and what the chosen plan (or the one under the pointer) is."""
    cluster, best = searched.appraiser.cluster, searched.best
    fitting = [each for each in searched.options if fits(each.memory, cluster)]
    others = [each for each in searched.options if not fits(each.memory, cluster)]
    near = [each for each in others if each.memory.total <= _NEAR * cluster.memory_bytes]
    edge = best_by_memory(fitting)
    rest = [each for each in fitting if each not in edge and each.decided != best.decided]
    series = (
        _series("fits", rest, searched, colour=0),
        _series("does not fit", [searched.appraiser.with_forecast(o) for o in near], searched, 5),
        _series("the fastest with so little memory", edge, searched, colour=2, joined=True),
        Series(
            name="chosen", points=(_point(best, searched, is_chosen=True),), colour=1, joined=False
        ),
    )
    capacity = cluster.memory_bytes
    limit = Mark(x=capacity / GIB, kind="limit", colour=5, text=f"{format_bytes(capacity)} there")
    far = len(others) - len(near)
    note = f"{len(fitting)} of {len(searched.options)} plans fit"
    beyond = f"; {far} that need more than {format_bytes(_NEAR * capacity)} are not drawn"
    return draw_plot(
        Plot(
            name="frontier",
            title="tok/s of one GPU, by the memory that it needs",
            series=tuple(each for each in series if each.points),
            marks=(limit,),
            note=note + (beyond if far else ""),
            across="GiB of one GPU at the peak",
        )
    )


def best_by_memory(options: list[Option]) -> list[Option]:
    """Those that no other beats in speed with as little memory, the smallest first."""
    edge: list[Option] = []
    for option in sorted(options, key=lambda each: (each.memory.total, -each.speed)):
        if not edge or option.speed > edge[-1].speed:
            edge.append(option)
    return edge


def _series(
    name: str, options: list[Option], searched: Searched, colour: int, *, joined: bool = False
) -> Series:
    ordered = sorted(options, key=lambda each: each.memory.total)
    points = tuple(_point(option, searched) for option in ordered)
    hollow = name == "does not fit"
    return Series(name=name, points=points, colour=colour, dashed=hollow, joined=joined)


def _point(option: Option, searched: Searched, *, is_chosen: bool = False) -> PlotPoint:
    is_best = option.decided == searched.best.decided
    lost = "" if is_best else f"; {why_not(option, searched.best, searched.appraiser.cluster)}"
    return PlotPoint(
        x=option.memory.total / GIB,
        y=option.speed,
        shown=f"{option.speed:,.0f} tok/s with {option.label}{lost}",
        where=format_bytes(option.memory.total),
        is_chosen=is_chosen,
    )
