"""An axis: its range, its ticks at round numbers, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUND = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from values to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value lies; what is beyond the range lies on its edge."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether a value is inside the range."""
        return self.low <= value <= self.high

    def ticks(self, about: int, *, whole: bool = False) -> list[float]:
        """About this many round numbers inside the range; `whole` allows no fractions."""
        step = _round_up((self.high - self.low) / about)
        step = max(1.0, step) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [count * step for count in range(first, last + 1)]


def axis_of(values: Sequence[float], start: float, end: float, *, room: float = 0.06) -> Axis:
    """An axis over all values with a margin. It goes below zero only if values do."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    # Values that agree to six digits are one value: more of them would not fit a label.
    spread = high - low if high - low > 1e-6 * abs(high) else 0.0
    margin = room * spread or 0.05 * abs(high) or 0.5
    floor = 0.0 if low >= 0 else -math.inf
    return Axis(max(floor, low - margin), high + margin, start, end)


def labels(ticks: Sequence[float]) -> list[str]:
    """One label per tick, all with the same number of digits and the same suffix."""
    top = max((abs(tick) for tick in ticks), default=0.0)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else top
    if 0 < top < 1e-2:
        return [_small(tick, step) for tick in ticks]
    size, suffix = next((pair for pair in _SUFFIXES if top >= pair[2]), (1.0, "", 0.0))[:2]
    digits = max(0, -math.floor(math.log10(step / size) + 1e-9)) if step else 0
    return [f"{tick / size:.{digits}f}{suffix if tick else ''}" for tick in ticks]


# (divided by, suffix, from where on): 5000 is shorter than 5.0k.
_SUFFIXES = ((1e12, "T", 1e12), (1e9, "B", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4))


def _small(value: float, step: float) -> str:
    """0.00025 -> '2.5e-4', with the digits that ticks `step` apart need."""
    if value == 0:
        return "0"
    needed = math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9)
    digits, _, power = f"{value:.{max(0, needed)}e}".partition("e")
    short = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{short}e{int(power)}"


def _round_up(raw: float) -> float:
    size = 10.0 ** math.floor(math.log10(raw))
    return next(factor * size for factor in _ROUND if factor * size >= raw * (1 - 1e-9))
