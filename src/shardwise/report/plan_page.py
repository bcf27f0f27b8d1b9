"""The page of a plan: what was chosen, what it takes, and what else there would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.metrics.verdict import SPEED_BAND
from shardwise.plan.elsewhere import other_kinds, other_sizes, searched_for
from shardwise.plan.grid import look_around
from shardwise.plan.joint_searches import JointSearches
from shardwise.plan.picture import picture_lines
from shardwise.plan.planned import Alternative, Forecast, Plan
from shardwise.plan.search import fits
from shardwise.plan.searched import Searched
from shardwise.plan.stage_memory import largest_over_step
from shardwise.report.breakdown import (
    draw_parts,
    exact,
    memory_parts,
    parts_legend,
    parts_table,
    time_parts,
)
from shardwise.report.explore import draw_controls, grid_data
from shardwise.report.frontier import draw_frontier
from shardwise.report.markup import Html, join, table, tag
from shardwise.report.page import PageKind, WebPage, render_page, section
from shardwise.report.page_file import validate_target, write_page
from shardwise.report.places import draw_sizes, kinds_table
from shardwise.report.plan_tables import choices_table
from shardwise.report.stacked_bars import Stack, Stacks, draw_stacks
from shardwise.report.values import percent, short_seconds
from shardwise.units import GIB, format_bytes, format_count, format_duration

# Alternatives that stand beside the picture; the rest is folded up.
_NEAREST = 12

PLAN_PAGE = PageKind(
    "shardwise plan",
    "the page of a plan",
    "--html",
    styles=("report/page.css", "report/plan.css"),
    scripts=("report/page.js", "report/plan.js"),
)


def write_plan_page(plan: Plan, target: Path, budget_tokens: float | None = None) -> int:
    """Write the page; returns its size. Without a budget its time and cost are those of the run."""
    validate_target(PLAN_PAGE, target)
    return write_page(PLAN_PAGE, render_plan(plan, budget_tokens), target)


def render_plan(plan: Plan, budget_tokens: float | None = None) -> str:
    """The whole page."""
    tokens = budget_tokens or plan.settings.train.steps * plan.tokens_per_step
    searches = JointSearches(plan)
    searched, grid = searched_for(searches), look_around(searches)
    page = WebPage(
        title=f"{plan.model.name} on {plan.cluster.name}",
        header=_header(plan, searched, tokens),
        sections=[
            section("memory", "Memory of one rank, over a step", _memory(plan)),
            *_time(plan),
            section("try", "Try other settings", draw_controls(plan, grid, tokens)),
            section("candidates", "Every plan that was looked at", *_candidates(plan, searched)),
            *_elsewhere(searches, tokens),
            section("decisions", "Every decision, with its reason", *_decisions(plan)),
        ],
        data=grid_data(plan, grid, tokens),
    )
    return render_page(PLAN_PAGE, page)


def _header(plan: Plan, searched: Searched, tokens: float) -> Iterator[Html]:
    cluster = plan.cluster
    nodes = f" in {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    yield tag("h1", f"{plan.model.name} on {plan.world_size} x {cluster.device_name}{nodes}")
    yield tag("p", *_lede(plan, searched), class_="lede")
    yield tag("p", *_expected(plan, tokens), class_="lede")
    for warning in plan.warnings:
        yield tag("p", warning, class_="alert")
    tiles = [
        tag("div", tag("dt", what), tag("dd", figure), tag("dd", more, class_="note"))
        for what, figure, more in _tiles(plan, tokens)
    ]
    yield tag("dl", *tiles, class_="tiles hero")


def _lede(plan: Plan, searched: Searched) -> Iterator[object]:
    parameters = format_count(plan.model.total_params)
    yield f"Chosen for {parameters} parameters and sequences of {plan.decided.seq_len:,} tokens: "
    yield tag("b", searched.best.label)
    fitting = sum(fits(option.memory, plan.cluster) for option in searched.options)
    yield f", out of {len(searched.options)} plans that were looked at, of which {fitting} fit."


def _expected(plan: Plan, tokens: float) -> Iterator[object]:
    memory, forecast = plan.memory, plan.forecast
    band = f"± {SPEED_BAND:.0%}"
    if forecast is not None:
        speed = f"{forecast.tokens_per_s:,.0f} tok/s"
        yield "Expected: "
        yield tag("b", exact("forecast.tokens_per_s", forecast.tokens_per_s, speed))
        yield f" of each {_device(plan)} ({band}), {_all_speed(plan, forecast)} of all; "
    else:
        yield f"No rates are known for {plan.cluster.device_in_words}, so there is no speed. "
    yield tag("b", format_bytes(memory.total))
    yield (
        f" of {format_bytes(plan.cluster.memory_bytes)} at the peak "
        f"({format_bytes(memory.low)} to {format_bytes(memory.high)} likely)"
    )
    if forecast is not None:
        yield f"; {format_count(tokens)} tokens in "
        yield tag("b", _duration(forecast, tokens))
        yield f" ({band})"
        if (cost := _cost(forecast, tokens)) is not None:
            yield " for "
            yield tag("b", cost)
    yield "."


def _tiles(plan: Plan, tokens: float) -> Iterator[tuple[str, object, object]]:
    """(what, figure, what else there is to it)."""
    forecast, memory, device = plan.forecast, plan.memory, _device(plan)
    band, budget = f"± {SPEED_BAND:.0%}", f"{format_count(tokens)} tokens"
    if forecast is not None:
        each = exact(
            "forecast.tokens_per_s", forecast.tokens_per_s, f"{forecast.tokens_per_s:,.0f} tok/s"
        )
        yield f"speed of one {device}", each, f"{band}; {_all_speed(plan, forecast)} of all"
    there = format_bytes(plan.cluster.memory_bytes)
    likely = f"{format_bytes(memory.low)} to {format_bytes(memory.high)} likely, of {there}"
    yield f"memory of one {device}", format_bytes(memory.total), likely
    if forecast is None:
        return
    step = exact("forecast.step_s", forecast.step_s, short_seconds(forecast.step_s))
    a_step = join([step, f" for a step of {format_count(plan.tokens_per_step)} tokens"])
    if forecast.mfu is not None:
        yield "MFU", exact("forecast.mfu", forecast.mfu, percent(forecast.mfu)), a_step
    hours, usd = forecast.hours_per_billion_tokens, forecast.usd_per_billion_tokens
    billion = exact("forecast.hours_per_billion_tokens", hours, format_duration(3600 * hours))
    yield f"time for {budget}", _duration(forecast, tokens), join([billion, " for 1B tokens"])
    if usd is None:
        yield f"cost of {budget}", "-", "no price is known: set cluster.usd_per_gpu_hour"
        return
    billion = exact("forecast.usd_per_billion_tokens", usd, f"USD {usd:,.0f}")
    yield f"cost of {budget}", _cost(forecast, tokens), join([billion, " for 1B tokens"])


def _memory(plan: Plan) -> Html:
    over_step = largest_over_step(plan.model, plan.cluster, plan.decided)
    peak = max(over_step, key=lambda where: over_step[where].total)
    bars = [
        Stack(
            where,
            tuple((part.style, part.amount / GIB) for part in memory_parts(held)),
            format_bytes(held.total),
            f"{where}: {format_bytes(held.total)}, "
            + ", ".join(f"{part.name} {part.shown}" for part in memory_parts(held)),
            is_chosen=where == peak,
        )
        for where, held in over_step.items()
    ]
    capacity, memory = plan.cluster.memory_bytes, plan.memory
    stacks = Stacks(
        "memory",
        "GiB of a rank, at each moment of a step",
        tuple(bars),
        capacity / GIB,
        f"{format_bytes(capacity)}: the device",
    )
    total = (tag("b", "total"), tag("b", format_bytes(memory.total)))
    share = tag("b", percent(memory.total / capacity))
    head = (f"at the peak: {peak}", "bytes", "of a device")
    held = parts_table(head, memory_parts(memory), capacity, (*total, share))
    return tag("div", draw_stacks(stacks), tag("div", held), class_="pair")


def _time(plan: Plan) -> Iterator[Html]:
    forecast = plan.forecast
    if forecast is None:
        return
    parts, step_s = time_parts(forecast), forecast.step_s
    source = {"catalogue": "the catalogue's", "measured": "measured ones"}[forecast.source]
    yield section(
        "time",
        f"Where the {short_seconds(step_s)} of a step go",
        draw_parts("step", parts, step_s),
        parts_legend(parts, step_s),
        tag("p", f"The device's rates are {source}.", class_="note"),
    )


def _candidates(plan: Plan, searched: Searched) -> Iterator[Html]:
    """The picture, and beside it the best of each other mesh and way to recompute."""
    head = ("plan", f"tok/s of one {_device(plan)}", "memory", "why not")
    rows = [_alternative(number, each) for number, each in enumerate(plan.alternatives)]
    near, rest = rows[:_NEAREST], rows[_NEAREST:]
    nearest = tag("div", table(head, near, numbers=(1, 2), stacked=True)) if near else ""
    drawn = draw_frontier(searched) if plan.forecast is not None else ""
    yield tag("div", drawn, nearest, class_="pair")
    if rest:
        more = table(head, rest, numbers=(1, 2), stacked=True)
        yield tag("details", tag("summary", f"{len(rest)} more, and why they lost"), more)


def _alternative(number: int, other: Alternative) -> tuple[object, ...]:
    path, speed, held = f"alternatives.{number}", other.tokens_per_s, other.memory_bytes
    return (
        other.label,
        "-" if speed is None else exact(f"{path}.tokens_per_s", speed, f"{speed:,.0f}"),
        exact(f"{path}.memory_bytes", held, format_bytes(held)),
        other.why_not,
    )


def _elsewhere(searches: JointSearches, tokens: float) -> Iterator[Html]:
    plan = searches.plan
    if plan.forecast is None or plan.cluster.gpu is None:
        return
    sizes = other_sizes(searches)
    yield section("sizes", "More or fewer GPUs", *draw_sizes(plan, sizes, tokens))
    kinds = other_kinds(searches)
    yield section("kinds", "Other GPUs, and what they may cost", *kinds_table(plan, kinds, tokens))


def _decisions(plan: Plan) -> Iterator[Html]:
    yield choices_table(plan)
    if lines := picture_lines(plan):
        yield tag("h3", "Where the ranks are")
        yield tag("pre", join(f"{line}\n" for line in lines), tabindex=0)


def _device(plan: Plan) -> str:
    return "GPU" if plan.cluster.device == "cuda" else "rank"


def _all_speed(plan: Plan, forecast: Forecast) -> str:
    return f"{format_count(forecast.tokens_per_s * plan.world_size)} tok/s"


def _duration(forecast: Forecast, tokens: float) -> str:
    return format_duration(3600 * forecast.hours_per_billion_tokens * tokens / 1e9)


def _cost(forecast: Forecast, tokens: float) -> str | None:
    usd = forecast.usd_per_billion_tokens
    return None if usd is None else f"USD {usd * tokens / 1e9:,.0f}"
