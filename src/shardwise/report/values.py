"""Values from events that others wrote: a number, or nothing; and how they are shown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.units import format_duration

Event = dict[str, Any]
# Beyond this a value is damage, and would overflow an axis.
_LARGEST = 1e100


def number(event: Any, *path: str) -> float | None:
    """The finite number at `path` of an event, else None."""
    for key in path:
        # Nearly all are plain dictionaries, and to ask so takes a fraction of the time.
        if type(event) is dict:
            event = event.get(key)
        else:
            event = event.get(key) if isinstance(event, Mapping) else None
    # NaN is not between.
    if type(event) is float:
        return event if -_LARGEST < event < _LARGEST else None
    if isinstance(event, bool) or not isinstance(event, int | float):
        return None
    # Compared before it is converted: an integer may have hundreds of digits.
    return float(event) if -_LARGEST < event < _LARGEST else None


def whole(event: Any, *path: str) -> int | None:
    """The whole number at `path`, else None."""
    found = number(event, *path)
    return int(found) if found is not None and found == int(found) else None


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """The events of these kinds, in order."""
    return [event for event in events if event["event"] in kinds]


def plain(value: object) -> str:
    """A value of any type in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value, default=str)


def clock(seconds: float | None) -> str:
    """A time of day, in UTC: the report may be read where the run was not."""
    if seconds is None or not 0 <= seconds < 2e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def short_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms'; 0.0000041 -> '4.1 us'; 90 -> '1m30s'."""
    for unit, size in (("ms", 1e-3), ("us", 1e-6)):
        if size <= abs(seconds) < 1000 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s" if abs(seconds) < 60 else format_duration(seconds)


def percent(share: float | None) -> str:
    """0.481 -> '48.1%'."""
    return "-" if share is None else f"{share:.1%}"
