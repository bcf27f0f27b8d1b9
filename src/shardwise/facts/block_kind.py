"""Kinds of blocks and what each saves for backward: as plain numbers, so that a plan needs no torch
to use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwise.facts.block_work import Work


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saves of one token in one block."""

    channels: float
    """Elements in the dtype that the model computes in."""

    fixed_bytes: float
    """Bytes in other dtypes: statistics of norms and attention, indices of experts."""

    scores: float = 0.0
    """Bytes for each token of the sequence, if attention is `eager` and saves its scores; counted
    where that is the first attention that a family has."""

    backward_bytes: int | None = None
    """Bytes in 16-bit training that backward needs at its peak above all that was saved; None where
    it was not counted."""

    def bytes(self, width: int, scored: int) -> float:
        """The bytes with elements of `width` bytes, and scores of so many tokens."""
        return width * self.channels + self.fixed_bytes + scored * self.scores


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks with the same layers and the same window, and what each of them saves."""

    count: int
    """How many blocks of the model are of this kind."""

    saved: dict[str, Saved]
    """By how the block runs: `way_of` gives the key."""

    work: Work
    """What each of them computes."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Back from JSON."""
        saved = {way: Saved(**numbers) for way, numbers in data["saved"].items()}
        return cls(count=data["count"], saved=saved, work=Work.from_dict(data["work"]))


def way_of(*, compiled: bool, own_kernels: bool, recompute: str = "none") -> str:
    """The name of a way to run a block, such as `compiled selective`."""
    words = (
        "compiled" if compiled else "eager",
        "own" if own_kernels else "",
        "" if recompute == "none" else recompute,
    )
    return " ".join(filter(None, words))
