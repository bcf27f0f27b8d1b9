"""Boxes of a tensor, as offsets and sizes: do they lie inside it, and are they the whole of it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: Sizes
    sizes: Sizes

    @property
    def num_elements(self) -> int:
        """Of this part."""
        return math.prod(self.sizes)

    def lies_in(self, shape: Sizes) -> bool:
        """Whether a tensor of `shape` has all of it."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def meets(self, other: Box) -> bool:
        """Whether the two share an element."""
        return all(
            a < b + size_b and b < a + size_a
            for a, size_a, b, size_b in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )


def validate_sizes(values: Any) -> Sizes:
    """Whole numbers that a tensor could have as sizes, offsets or places in a file."""
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise ValueError("not sizes: they must be whole numbers from 0 to 2**48")
    return sizes


def cover_once(shape: Sizes, boxes: Iterable[Box]) -> bool:
    """Whether every element of a tensor is in one of `boxes`, which lie inside it, and in one only.

    Disjoint and as many elements as the tensor: together that is covering it exactly.
    """
    filled = sorted((box for box in boxes if box.num_elements), key=lambda box: box.offsets)
    covered = sum(box.num_elements for box in filled)
    return covered == math.prod(shape) and not _any_overlap(filled)


def _any_overlap(boxes: Sequence[Box]) -> bool:
    """Sorted by their first offset, each box can meet only those that start before it ends."""
    for number, box in enumerate(boxes):
        for later in range(number + 1, len(boxes)):
            other = boxes[later]
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if box.meets(other):
                return True
    return False
