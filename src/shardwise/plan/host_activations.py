"""Which blocks keep their activations in host memory, and how many blocks a copy takes."""

from __future__ import annotations

from math import ceil


def patience(share: float) -> int:
    """The number of forward blocks during which the copies of one block run."""
    return ceil(1 / share)


def chosen(num_blocks: int, share: float) -> list[int]:
    """The blocks whose activations go to host memory.

    They are evenly spaced from the first block on, and all copies are complete when forward ends,
    so none is on the device at the peak of a step. The blocks that backward needs first stay.
    """
    count = round(share * num_blocks)
    if not count:
        return []
    span = max(count, num_blocks - patience(share))
    return [index * span // count for index in range(count)]
