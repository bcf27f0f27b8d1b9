"""Durations as Prometheus spells them, and texts in which all of them are scaled alike."""

from __future__ import annotations

import re

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"\b(\d+)(s|m|h|d)\b")
_SECONDS = re.compile(r"seconds\((\d+)(ms|s|m|h|d)\)")


def stretch_durations(text: str, factor: float) -> str:
    """`rate(x[5m])` by 0.1 is `rate(x[30s])`; what people read is stretched too.

    `seconds(5m)` becomes a number: PromQL of older servers knows durations only as windows.
    """
    if factor != 1:
        text = _DURATION.sub(lambda m: spell_duration(factor * _read_ms(m) / 1000), text)
    return _SECONDS.sub(lambda m: f"{_read_ms(m) / 1000:g}", text)


def spell_duration(seconds: float) -> str:
    """90 is `90s`, 120 is `2m`, 0.25 is `250ms`: Prometheus reads whole numbers only."""
    whole = round(1000 * seconds)
    if whole == 0:
        return "0m"
    unit = next(unit for unit in reversed(_UNITS_MS) if whole % _UNITS_MS[unit] == 0)
    return f"{whole // _UNITS_MS[unit]}{unit}"


def _read_ms(match: re.Match[str]) -> int:
    return int(match[1]) * _UNITS_MS[match[2]]
