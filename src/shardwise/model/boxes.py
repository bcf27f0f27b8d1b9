"""Boxes of a tensor, as offsets and sizes, and where they lie in the tensor, in each other and
in its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: Sizes
    sizes: Sizes

    @property
    def num_elements(self) -> int:
        """The number of elements of this part."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that index a tensor to get this part."""
        return tuple(slice(a, a + size) for a, size in zip(self.offsets, self.sizes, strict=True))

    def lies_in(self, shape: Sizes) -> bool:
        """Whether this part lies inside a tensor of `shape`."""
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

    def overlap(self, other: Box) -> Box:
        """The part that both have; where they do not meet, it has no elements."""
        pairs = list(zip(self._bounds, other._bounds, strict=True))
        offsets = tuple(max(a, b) for (a, _), (b, _) in pairs)
        ends = (min(a, b) for (_, a), (_, b) in pairs)
        return Box(offsets, tuple(max(e - o, 0) for o, e in zip(offsets, ends, strict=True)))

    def seen_from(self, outer: Box) -> Box:
        """The same part, with offsets that count from where `outer` starts."""
        offsets = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    def moved_by(self, distance: Sizes) -> Box:
        """A part of the same size, elsewhere."""
        return Box(tuple(a + b for a, b in zip(self.offsets, distance, strict=True)), self.sizes)

    def runs_in(self, shape: Sizes) -> Iterator[range]:
        """The runs of elements of this part in a contiguous tensor of `shape`, in order."""
        # Trailing dims that are whole are contiguous with the last dim that is cut.
        cut = max((dim for dim, size in enumerate(self.sizes) if size != shape[dim]), default=0)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        starts = product(*(range(a, b) for a, b in self._bounds[:cut]))
        first = self.offsets[cut] * strides[cut] if shape else 0
        length = math.prod(self.sizes[cut:])
        for outer in starts:
            start = first + sum(a * s for a, s in zip(outer, strides, strict=False))
            yield range(start, start + length)

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return [(a, a + size) for a, size in zip(self.offsets, self.sizes, strict=True)]


def whole_box(shape: Iterable[int]) -> Box:
    """All of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def validate_sizes(values: Any) -> Sizes:
    """Raise unless these are whole numbers that a tensor could have as sizes, offsets or places
    in a file."""
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        raise ValueError("not sizes: they must be whole numbers from 0 to 2**48")
    return sizes


def cover_once(shape: Sizes, boxes: Iterable[Box]) -> bool:
    """Whether `boxes`, which lie inside a tensor, hold every element of it exactly once.

    Boxes that are disjoint and have as many elements as the tensor cover it exactly.
    """
    filled = [box for box in boxes if box.num_elements]
    covered = sum(box.num_elements for box in filled)
    return covered == math.prod(shape) and not _any_overlap(filled)


def _any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes share an element.

    Boxes are sorted by their start in one dim, so each can meet only those that start before it
    ends. That dim is the one with the most starts: in a dim that is not cut, all boxes start alike.
    """
    num_dims = len(boxes[0].sizes) if boxes else 0
    dim = max(range(num_dims), key=lambda d: len({box.offsets[d] for box in boxes}), default=None)
    if dim is None:
        return len(boxes) > 1
    ordered = sorted(boxes, key=lambda box: box.offsets[dim])
    for number, box in enumerate(ordered):
        for later in range(number + 1, len(ordered)):
            other = ordered[later]
            if other.offsets[dim] >= box.offsets[dim] + box.sizes[dim]:
                break
            if box.meets(other):
                return True
    return False
