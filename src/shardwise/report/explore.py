"""Sliders over a grid of plans that was computed beforehand: all that the page's script needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.plan.grid import Grid
from shardwise.plan.planned import Plan
from shardwise.plan.search import Option, fits
from shardwise.report.bars import draw_bar
from shardwise.report.breakdown import MEMORY_WORDS, STACKED, time_words
from shardwise.report.markup import Html, join, tag
from shardwise.units import format_count

# How much of the memory bar the device's memory is: what does not fit goes beyond it.
DEVICE_SHARE = 0.75
_FIGURES = (
    ("speed", "tok/s of one GPU"),
    ("mfu", "MFU"),
    ("memory", "memory at the peak"),
    ("step", "one step"),
    ("time", "{} tokens take"),
    ("cost", "{} tokens cost"),
)


@dataclass(frozen=True, slots=True)
class _Knob:
    """One slider."""

    name: str
    label: str
    shown: tuple[str, ...]
    overrides: tuple[str, ...]
    """What `shardwise plan` is told for each value."""

    at: int
    """The plan's own value."""


def draw_controls(plan: Plan, grid: Grid, tokens: float) -> Html:
    """Sliders, and beside them what comes out. Without a script there is nothing to slide."""
    knobs = [_draw_knob(knob) for knob in _knobs(plan, grid)]
    budget = format_count(tokens)
    tiles = [
        tag(
            "div",
            tag("dt", label.format(budget)),
            tag("dd", tag("span", "-", id=f"try-{name}"), tag("small", "", id=f"than-{name}")),
        )
        for name, label in _FIGURES
    ]
    memory = [(f"held-{name}", 0.0, "") for name in STACKED]
    terms = [(f"term-{name}", 0.0, "") for name in _terms(plan)]
    answer = tag(
        "div",
        tag("p", "", id="try-label", role="status", class_="verdict"),
        tag("dl", *tiles, class_="tiles"),
        tag("p", "memory of one rank; the line is the device", class_="bar"),
        tag("div", draw_bar("try-held", memory), tag("i", id="try-limit"), class_="under"),
        tag("p", "time of a step", class_="bar") if terms else "",
        draw_bar("try-terms", terms) if terms else "",
        tag("p", "the same command, with your own file:", class_="note"),
        tag("pre", "", id="try-command", tabindex=0),
        class_="answer",
    )
    back = tag("button", "back to the plan", type="button", id="try-back")
    controls = tag("div", *knobs, back, class_="knobs")
    text = "Moving a slider needs JavaScript; every other part of this page does without."
    return join([tag("noscript", tag("p", text)), tag("div", controls, answer, class_="explorer")])


def grid_data(plan: Plan, grid: Grid, tokens: float) -> dict[str, Any]:
    """The grid as JSON: of each spot a reason, or all of its figures as the planner has them."""
    labels: dict[str, int] = {}
    terms = _terms(plan)
    return {
        "tokens": tokens,
        "share": DEVICE_SHARE,
        "knobs": [
            {"name": knob.name, "shown": knob.shown, "overrides": knob.overrides, "at": knob.at}
            for knob in _knobs(plan, grid)
        ],
        "kept": _kept(plan),
        "capacity": [cluster.memory_bytes for cluster in grid.clusters],
        "memory": [MEMORY_WORDS[name] for name in STACKED],
        "terms": [time_words(name) for name in terms],
        "spots": [_spot(each, terms, labels, plan) for each in grid.spots],
        "labels": list(labels),
    }


def _spot(found: Option | str, terms: list[str], labels: dict[str, int], plan: Plan) -> Any:
    if isinstance(found, str):
        return labels.setdefault(found, len(labels))
    memory, forecast = found.memory, found.forecast
    spot: dict[str, Any] = {
        "label": labels.setdefault(found.label, len(labels)),
        "fits": fits(memory, plan.cluster),
        "held": [getattr(memory, name) for name in STACKED],
    }
    if forecast is not None:
        spot |= {
            "speed": forecast.tokens_per_s,
            "mfu": forecast.mfu,
            "step": forecast.step_s,
            "hours": forecast.hours_per_billion_tokens,
            "usd": forecast.usd_per_billion_tokens,
            "terms": [forecast.terms[name] for name in terms],
        }
    return spot


def _knobs(plan: Plan, grid: Grid) -> Iterator[_Knob]:
    decided = plan.decided
    sizes, lengths = [each.world_size for each in grid.clusters], grid.seq_lens
    yield _Knob(
        "gpus",
        "GPUs",
        tuple(map(str, sizes)),
        tuple(f"--cluster {each.name}" for each in grid.clusters),
        sizes.index(plan.world_size),
    )
    yield _Knob(
        "sequence",
        "tokens of a sequence",
        tuple(f"{length:,}" for length in lengths),
        tuple(f"data.seq_len={length}" for length in lengths),
        lengths.index(decided.seq_len),
    )
    yield _Knob(
        "recompute",
        "blocks that are recomputed",
        tuple(f"{mode:.0%}" if isinstance(mode, float) else mode for mode in grid.recompute),
        tuple(f"memory.checkpoint_activations={mode}" for mode in grid.recompute),
        grid.recompute.index(decided.checkpoint_activations),
    )
    yield _Knob(
        "micro",
        "sequences of a micro-batch",
        tuple(map(str, grid.micro_batches)),
        tuple(f"train.micro_batch={size}" for size in grid.micro_batches),
        grid.micro_batches.index(decided.micro_batch),
    )


def _draw_knob(knob: _Knob) -> Html:
    top = len(knob.shown) - 1
    slider = tag(
        "input",
        type="range",
        id=f"knob-{knob.name}",
        min=0,
        max=top,
        step=1,
        value=knob.at,
        aria_valuetext=knob.shown[knob.at],
        disabled="" if top == 0 else None,
    )
    value = tag("output", knob.shown[knob.at], for_=f"knob-{knob.name}")
    ends = tag("small", tag("span", knob.shown[0]), tag("span", knob.shown[-1]), aria_hidden="true")
    return tag("label", tag("span", knob.label), value, slider, ends)


def _kept(plan: Plan) -> str:
    """What the grid leaves as the plan has it."""
    decided = plan.decided
    sizes = {"tensor": decided.tensor, "context": decided.context, "expert": decided.expert}
    return " ".join(f"mesh.{name}={size}" for name, size in sizes.items())


def _terms(plan: Plan) -> list[str]:
    return [] if plan.forecast is None else list(plan.forecast.terms)
