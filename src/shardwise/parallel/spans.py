"""Where the numbers of a rank lie in the model: spans of one long row of all parameters.

Sites may have different numbers of ranks, so two of them cut the model at different places. What a
rank has to ask of another one is where their spans overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.model.weights import local_box


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Neighbours in the row."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first number behind it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Shared:
    """Numbers that two ranks have: where they lie in the vector of each, and how many."""

    mine: int
    theirs: int
    length: int


def spans_of(params: Iterable[Tensor]) -> list[RowSpan]:
    """What this rank keeps of parameters that come in the same order everywhere. Its vector is its
    own parts one after the other."""
    found, before = [], 0
    for param in params:
        runs = local_box(param).runs_in(tuple(param.shape))
        found += [RowSpan(before + run.start, len(run)) for run in runs if len(run)]
        before += param.numel()
    return found


def cut(spans: Iterable[RowSpan], first: int, end: int) -> list[RowSpan]:
    """The spans of numbers `first` to `end` of a vector."""
    found, place = [], 0
    for span in spans:
        low, high = max(first, place), min(end, place + span.length)
        if low < high:
            found.append(RowSpan(span.start + low - place, high - low))
        place += span.length
    return found


def shared(mine: Sequence[RowSpan], theirs: Sequence[RowSpan]) -> Iterator[Shared]:
    """Where two vectors have the same numbers. Spans of each are in order."""
    my_place = their_place = i = j = 0
    while i < len(mine) and j < len(theirs):
        one, other = mine[i], theirs[j]
        low, high = max(one.start, other.start), min(one.end, other.end)
        if low < high:
            offsets = my_place + low - one.start, their_place + low - other.start
            yield Shared(*offsets, high - low)
        if one.end <= other.end:
            my_place, i = my_place + one.length, i + 1
        else:
            their_place, j = their_place + other.length, j + 1
