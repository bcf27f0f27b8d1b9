"""Which blocks have their activations wait in host memory, and how long copies are on their way."""

from __future__ import annotations

from math import ceil


def patience(share: float) -> int:
    """Blocks of forward in which the copies of one leave."""
    return ceil(1 / share)


def chosen(num_blocks: int, share: float) -> list[int]:
    """Evenly spaced from the first on, and all gone when forward ends, so that none is in memory at
    the peak of a step; those that backward needs first stay."""
    count = round(share * num_blocks)
    if not count:
        return []
    span = max(count, num_blocks - patience(share))
    return [index * span // count for index in range(count)]
