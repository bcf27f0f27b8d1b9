"""What memory and a step are made of: the same names and colours in every picture and table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.plan.planned import MEMORY_PARTS, Forecast, MemoryEstimate
from shardwise.report.bars import draw_bar
from shardwise.report.markup import Html, table, tag
from shardwise.report.values import percent, short_seconds
from shardwise.units import format_bytes

# Communication that nothing hides, and what ranks wait for each other.
_COMMUNICATION = ("tensor_parallel", "expert_parallel", "exposed", "waiting", "between_sites")
# From below: what is always there, then what comes and goes.
_FROM_BELOW = (
    *("context", "params", "optimizer", "outer", "grads", "gathered", "buffers"),
    *("activations", "recompute", "loss", "allocator"),
)
MEMORY_WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "outer": "state of the outer step",
    "gathered": "parameters kept gathered",
    "buffers": "units gathered and reduced",
    "activations": "activations",
    "recompute": "computed again in backward",
    "loss": "loss and logits",
    "allocator": "pools of the allocator",
    "context": "CUDA and NCCL",
}
_TIME_WORDS = {
    "elementwise": "element-wise",
    "exposed": "exposed communication",
    "waiting": "waiting for other ranks",
    "launch": "kernel launches",
}
STACKED = tuple(sorted(MEMORY_PARTS, key=_FROM_BELOW.index))
"""The parts of memory, from below."""


@dataclass(frozen=True, slots=True)
class ShownPart:
    """One part of a whole."""

    style: str
    name: str
    amount: float
    shown: str
    figure: Html
    """What is shown, with the exact value and its place in plan.json."""


def memory_parts(memory: MemoryEstimate) -> list[ShownPart]:
    """The parts of memory, from below."""
    return [
        _part(f"memory.{name}", f"held-{name}", MEMORY_WORDS[name], amount, format_bytes(amount))
        for name in STACKED
        if (amount := getattr(memory, name))
    ]


def time_parts(forecast: Forecast) -> list[ShownPart]:
    """The terms of a step."""
    return [
        _part(f"forecast.terms.{name}", f"term-{name}", time_words(name), s, short_seconds(s))
        for name, s in forecast.terms.items()
        if s
    ]


def time_words(term: str) -> str:
    """A term of a step, in words."""
    return _TIME_WORDS.get(term, term.replace("_", " "))


def communication_share(forecast: Forecast) -> float:
    """The share of a step that goes to communication that nothing hides."""
    return sum(forecast.terms.get(name, 0.0) for name in _COMMUNICATION) / forecast.step_s


def exact(path: str, value: float, shown: str) -> Html:
    """A figure that a reader can take to the last digit; `path` is its place in plan.json."""
    return tag("data", shown, value=repr(value), data_of=path)


def draw_parts(name: str, parts: Iterable[ShownPart], whole: float) -> Html:
    """A bar of all parts, and below it the largest ones, or the one under the pointer."""
    parts = sorted(parts, key=lambda part: -part.amount)
    largest = ", ".join(f"{part.name} {percent(part.amount / whole)}" for part in parts[:4])
    drawn = [
        (part.style, share, f"{part.name}: {part.shown}, {percent(share)}")
        for part in parts
        for share in (part.amount / whole,)
    ]
    readout = tag("p", largest, class_="readout")
    return tag("figure", draw_bar(name, drawn), readout, class_="parts")


def parts_table(
    head: Iterable[str], parts: Iterable[ShownPart], whole: float, last: Iterable[object]
) -> Html:
    """The same in words, the largest first, and the whole."""
    rows = [
        (
            tag("span", tag("i", class_=f"key area {part.style}"), f" {part.name}"),
            part.figure,
            percent(part.amount / whole),
        )
        for part in sorted(parts, key=lambda part: -part.amount)
    ]
    return table(tuple(head), [*rows, tuple(last)], numbers=(1, 2))


def parts_legend(parts: Iterable[ShownPart], whole: float) -> Html:
    """The same where there is less room, without the whole."""
    found = [
        tag(
            "div",
            tag("dt", tag("i", class_=f"key area {part.style}"), f" {part.name}"),
            tag("dd", part.figure, tag("span", percent(part.amount / whole))),
        )
        for part in sorted(parts, key=lambda part: -part.amount)
    ]
    return tag("dl", *found, class_="legend")


def _part(path: str, style: str, name: str, amount: float, shown: str) -> ShownPart:
    return ShownPart(style, name, amount, shown, exact(path, amount, shown))
