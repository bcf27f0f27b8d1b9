"""The numbers of an event under the names of curves, exactly as events.jsonl holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.metrics.events import Event

# These events are points of curves. The others are moments, which only the record has.
CURVES = ("step", "eval", "checkpoint", "checkpoint_failed", "collectives", "nonfinite")
# Not a curve: when it was, and where on the x axis.
_AXES = ("event", "time", "step")
# What tells the rows of a table apart.
_ROW_NAMES = ("kind", "phase")


def scalars_of(event: Event) -> dict[str, float]:
    """{"step/loss": 2.4, "step/memory/allocated": 1024, ...}; empty for events without curves."""
    if event["event"] not in CURVES or "step" not in event:
        return {}
    fields = {name: value for name, value in event.items() if name not in _AXES}
    return dict(_flatten(event["event"], fields))


def _flatten(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{path}/{name}", inner)
    elif isinstance(value, list):
        for row in value:
            yield from _flatten_row(path, row)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _flatten_row(path: str, row: Any) -> Iterator[tuple[str, float]]:
    """A row of a table is named by its kind and phase; a row without them is no curve."""
    if isinstance(row, Mapping) and all(key in row for key in _ROW_NAMES):
        yield from _flatten("/".join([path, *(str(row[key]) for key in _ROW_NAMES)]), row)
