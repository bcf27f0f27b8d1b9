"""The run on other devices: curves over their number, and a table over their kinds and prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shardwise.plan.elsewhere import Elsewhere
from shardwise.plan.planned import Forecast, Plan
from shardwise.report.breakdown import communication_share
from shardwise.report.markup import Html, table, tag
from shardwise.report.plots import Plot, PlotPoint, Series, draw_plot
from shardwise.report.values import percent
from shardwise.units import format_bytes, format_count, format_duration

# From this share of a step on communication shows.
SHOWS = 0.05


@dataclass(frozen=True, slots=True)
class _Curve:
    """One figure over the number of devices."""

    name: str
    title: str
    value: Callable[[Forecast], float | None]
    show: Callable[[float], str]


def draw_sizes(plan: Plan, sizes: Sequence[Elsewhere], tokens: float) -> Iterator[Html]:
    """One small plot for each figure, and the same as a table."""
    yield tag("p", _where_it_shows(sizes), class_="note")
    yield tag(
        "div", *(_plot(curve, plan, sizes) for curve in _curves(sizes, tokens)), class_="grid"
    )
    head = ("GPUs", "tok/s of one", "of all", "MFU", "communication")
    rows = [_row(each, tokens) for each in sizes]
    more = (f"{format_count(tokens)} tokens", "USD", "layout")
    yield table((*head, *more), rows, numbers=range(7), stacked=True)


def kinds_table(plan: Plan, kinds: Sequence[Elsewhere], tokens: float) -> Iterator[Html]:
    """As many of every kind; a reader may set prices."""
    own = plan.forecast
    rate = _price(kinds[0])
    yield tag(
        "p",
        "A price that is not known is empty: write yours, in USD for a GPU-hour. As cheap at: the "
        "price at which these GPUs cost as much as the plan's own.",
        class_="note",
    )
    head = ("GPU", "tok/s", "MFU", "memory", f"{format_count(tokens)} tokens", "GPU-hours")
    more = ("USD/GPU-hour", "USD", "as cheap at", "layout")
    others = sorted(kinds[1:], key=lambda each: each.forecast is None or -_speed(each))
    rows = [_kind_row(each, tokens, own, rate) for each in (kinds[0], *others)]
    yield table((*head, *more), rows, name="prices", numbers=range(1, 9), stacked=True)
    if sources := _price_sources(kinds):
        yield tag("p", f"Prices by {sources}.", class_="note", id="price-sources")


def _curves(sizes: Sequence[Elsewhere], tokens: float) -> list[_Curve]:
    known = [each.forecast for each in sizes if each.forecast is not None]
    budget = format_count(tokens)
    hours = max(f.hours_per_billion_tokens for f in known) * tokens / 1e9
    unit, name = (24.0, "days") if hours > 72 else (1.0, "hours")

    def spent(forecast: Forecast) -> float:
        return forecast.hours_per_billion_tokens * tokens / 1e9 / unit

    def cost(forecast: Forecast) -> float | None:
        usd = forecast.usd_per_billion_tokens
        return None if usd is None else usd * tokens / 1e9

    curves = [
        _Curve("speed", "tok/s of one GPU", lambda f: f.tokens_per_s, lambda v: f"{v:,.0f} tok/s"),
        _Curve(
            "all",
            "tok/s of all GPUs",
            lambda f: 1e9 / 3600 / f.hours_per_billion_tokens,
            lambda v: f"{format_count(v)} tok/s",
        ),
        _Curve("mfu", "MFU, %", lambda f: _hundredfold(f.mfu), lambda v: f"{v:.1f}%"),
        _Curve(
            "shown",
            "exposed communication, % of a step",
            lambda f: 100 * communication_share(f),
            lambda v: f"{v:.1f}%",
        ),
        _Curve("days", f"{name} for {budget} tokens", spent, lambda v: f"{v:,.1f} {name}"),
        _Curve("cost", f"USD for {budget} tokens", cost, lambda v: f"USD {v:,.0f}"),
    ]
    return [curve for curve in curves if any(curve.value(f) is not None for f in known)]


def _plot(curve: _Curve, plan: Plan, sizes: Sequence[Elsewhere]) -> Html:
    points = []
    for place, each in enumerate(sizes):
        value = None if each.forecast is None else curve.value(each.forecast)
        if value is not None and each.option is not None:
            where = f"{each.cluster.world_size} GPUs"
            shown = f"{curve.show(value)}, {each.option.label}"
            is_own = each.cluster == plan.cluster
            points.append(PlotPoint(place, value, shown, where=where, is_chosen=is_own))
    ticks = tuple((place, str(each.cluster.world_size)) for place, each in enumerate(sizes))
    return draw_plot(
        Plot(
            name=f"sizes-{curve.name}",
            title=curve.title,
            series=(Series(name=plan.cluster.device_name, points=tuple(points), colour=0),),
            across="GPUs",
            ticks=ticks,
            from_zero=True,
        )
    )


def _where_it_shows(sizes: Sequence[Elsewhere]) -> str:
    """From how many devices on communication takes a part of the step that matters."""
    shares = {
        each.cluster.world_size: communication_share(each.forecast)
        for each in sizes
        if each.forecast is not None
    }
    showing = [size for size, share in shares.items() if share >= SHOWS]
    from_here = list(takewhile(lambda size: size in showing, reversed(shares)))
    what = f"more than {SHOWS:.0%} of a step is communication that nothing hides"
    if from_here:
        return f"Communication starts to show at {from_here[-1]} GPUs: from there on {what}."
    if showing:
        return f"With {' and '.join(map(str, showing))} GPUs {what}; with more of them it is less."
    return f"Up to {max(shares)} GPUs communication that nothing hides is under {SHOWS:.0%}."


def _row(each: Elsewhere, tokens: float) -> tuple[object, ...]:
    size, forecast = each.cluster.world_size, each.forecast
    if each.option is None or forecast is None:
        return (size, *["-"] * 6, each.why_not)
    usd = forecast.usd_per_billion_tokens
    return (
        size,
        f"{forecast.tokens_per_s:,.0f}",
        format_count(forecast.tokens_per_s * size),
        percent(forecast.mfu),
        percent(communication_share(forecast)),
        format_duration(3600 * forecast.hours_per_billion_tokens * tokens / 1e9),
        "-" if usd is None else f"{usd * tokens / 1e9:,.0f}",
        each.option.label,
    )


def _kind_row(
    each: Elsewhere, tokens: float, own: Forecast | None, rate: float | None
) -> tuple[object, ...]:
    name, forecast = each.cluster.device_name, each.forecast
    if each.option is None or forecast is None:
        return (name, *["-"] * 8, each.why_not)
    hours = forecast.hours_per_billion_tokens * tokens / 1e9
    price, gpu_hours = _price(each), hours * each.cluster.world_size
    even = None
    if rate is not None and own is not None:
        even = rate * own.hours_per_billion_tokens / forecast.hours_per_billion_tokens
    field = tag(
        "input",
        type="number",
        min=0,
        step="any",
        value=None if price is None else f"{price:.2f}",
        data_hours=repr(gpu_hours),
        aria_label=f"USD for a GPU-hour of {name}",
    )
    return (
        name,
        f"{forecast.tokens_per_s:,.0f}",
        percent(forecast.mfu),
        format_bytes(each.option.memory.total),
        format_duration(3600 * hours),
        f"{gpu_hours:,.0f}",
        field,
        tag("output", "-" if price is None else f"{price * gpu_hours:,.0f}"),
        "-" if even is None else f"{even:,.2f}",
        each.option.label,
    )


def _price_sources(kinds: Sequence[Elsewhere]) -> str:
    """Who says what a GPU-hour costs, and of which kinds."""
    found: dict[str, list[str]] = {}
    for each in kinds:
        if each.forecast is not None and (source := each.forecast.price_source) is not None:
            found.setdefault(source, []).append(each.cluster.device_name)
    return "; ".join(f"{source}: {', '.join(names)}" for source, names in found.items())


def _price(each: Elsewhere) -> float | None:
    """USD for an hour of one device, where it is known."""
    forecast = each.forecast
    if forecast is None or forecast.usd_per_billion_tokens is None:
        return None
    hours = forecast.hours_per_billion_tokens * each.cluster.world_size
    return forecast.usd_per_billion_tokens / hours


def _speed(each: Elsewhere) -> float:
    return each.option.speed if each.option is not None else 0.0


def _hundredfold(share: float | None) -> float | None:
    return None if share is None else 100 * share
