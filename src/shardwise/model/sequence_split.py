"""How ranks divide sequences, and how they see the keys and values of each other.

A sequence is cut into twice as many chunks as there are ranks. Rank r has the chunks r and, counted
from the end, r again. A token looks at all tokens before it, so each rank has the same work: a
short look and a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.internals.tensor_collectives import exchanged, gathered
from shardwise.model.masks import Sight

# Both are handed through models, FSDP2, recompute and the compiler, which know named tuples.


class SequenceSplit(NamedTuple):
    """A rank among those that divide sequences."""

    rank: int
    num_ranks: int
    group: str
    """The name of their process group."""

    def chunk_of(self, length: int) -> int:
        """The tokens of a chunk of a sequence of `length`."""
        return length // (2 * self.num_ranks)

    def firsts_in(self, length: int) -> tuple[int, int]:
        """Where the two chunks of this rank begin."""
        chunk = self.chunk_of(length)
        return self.rank * chunk, length - (self.rank + 1) * chunk

    def own(self, whole: Tensor) -> Tensor:
        """This rank's tokens of whole sequences, which lie along dim 1."""
        length = whole.shape[1]
        chunk = self.chunk_of(length)
        return torch.cat([whole[:, first : first + chunk] for first in self.firsts_in(length)], 1)


class SequencePart(NamedTuple):
    """What attention needs to know of the sequences that a rank has a part of."""

    split: SequenceSplit
    length: int
    """The tokens of a whole sequence."""

    starts: Tensor | None = None
    """`Documents.starts` of the whole sequences; None where attention covers all of each."""

    def seen_chunks(
        self, key: Tensor, value: Tensor, window: int | None
    ) -> list[tuple[Sight, Tensor, Tensor]]:
        """For each of this rank's chunks: what it sees, and the keys and values of that.

        Tensors are (sequences, heads, tokens, width). All ranks call this together. Where a window
        reaches no further than into the chunk before, only the ends of chunks travel.
        """
        chunk = self.split.chunk_of(self.length)
        width = key.shape[-1]
        # One message for both, tokens first, because ranks follow each other along the first dim.
        both = torch.cat([key, value], -1).permute(2, 0, 1, 3)
        if window is not None and window - 1 <= chunk:
            seen = self._neighbours(both, chunk, window - 1)
        else:
            seen = self._prefixes(both, chunk, window)
        turned = ((sight, sides.permute(1, 2, 0, 3)) for sight, sides in seen)
        return [(sight, sides[..., :width], sides[..., width:]) for sight, sides in turned]

    def _prefixes(self, both: Tensor, chunk: int, window: int | None) -> list[tuple[Sight, Tensor]]:
        whole: Tensor = Gathered.apply(both, self.split)
        sights = []
        for first in self.split.firsts_in(self.length):
            begin = 0 if window is None else max(0, first - window + 1)
            sights.append(Sight(begin, first, first + chunk))
        return [(sight, whole[sight.begin : sight.stop]) for sight in sights]

    def _neighbours(self, both: Tensor, chunk: int, reach: int) -> list[tuple[Sight, Tensor]]:
        rank, num_ranks, group = self.split
        head, tail = both.split(chunk)
        # The chunk after my first one is the next rank's, and the chunk after my second one is the
        # rank's before.
        is_first, is_last = rank == 0, rank == num_ranks - 1
        counts = [0] * num_ranks
        ends = []
        if not is_first:
            counts[rank - 1] = reach
            ends.append(tail[chunk - reach :])
        if not is_last:
            counts[rank + 1] = reach
            ends.append(head[chunk - reach :])
        taken = list(Exchanged.apply(torch.cat(ends), counts, group).split([reach] * len(ends)))
        before_tail = head[chunk - reach :] if is_last else taken.pop()
        before_head = [] if is_first else [taken.pop()]
        first, second = self.split.firsts_in(self.length)
        begin = first if is_first else first - reach
        return [
            (Sight(begin, first, first + chunk), torch.cat([*before_head, head])),
            (Sight(second - reach, second, second + chunk), torch.cat([before_tail, tail])),
        ]


class Gathered(torch.autograd.Function):
    """The tokens of all ranks in the order of the sequence, along dim 0.

    In backward each rank gets what the others found for its tokens, in their format, and sums in
    fp32: no more bytes travel than in a reduce-scatter, and the sum is rounded once.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, split: SequenceSplit) -> Tensor:
        """Gather, and put chunks in order."""
        ctx.split = split
        chunks = gathered(mine, split.num_ranks, split.group).unflatten(
            0, (split.num_ranks, 2, len(mine) // 2)
        )
        heads, tails = chunks.unbind(1)
        return torch.cat([heads, tails.flip(0)]).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Hand each rank its chunks, and sum up this rank's own."""
        (grad,), split = grads, ctx.split
        heads, tails = grad.unflatten(0, (2, split.num_ranks, -1)).unbind()
        by_rank = torch.stack([heads, tails.flip(0)], 1).flatten(0, 2)
        rows = [len(grad) // split.num_ranks] * split.num_ranks
        parts = exchanged(by_rank, rows, rows, split.group)
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = parts.unflatten(0, (split.num_ranks, -1)).sum(0, dtype=wide)
        return summed.to(grad.dtype), None


class Exchanged(torch.autograd.Function):
    """Rows for other ranks, given for as many of theirs."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: Sequence[int], group: str) -> Tensor:
        """Give and take `counts` rows, by rank."""
        ctx.counts, ctx.group = counts, group
        return exchanged(mine, counts, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Give back the gradients of what was taken."""
        (grad,) = grads
        return exchanged(grad, ctx.counts, ctx.counts, ctx.group), None, None
