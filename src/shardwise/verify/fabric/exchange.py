"""One collective over one group: its tensors, its call, and whether the right data came out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.facts.collective_cost import Collective

# Element i of rank r holds `i mod 97 + 97 (r + 1)`: no two ranks send the same, and sums over up to
# 500 ranks are exact in fp32.
_PERIOD = 97
_ELEMENT = 4


def pattern(rank: int, start: int, count: int, device: torch.device) -> Tensor:
    """What `rank` sends as its elements from `start` on."""
    return _phase(start, count, device) + _PERIOD * (rank + 1)


class Exchange:
    """The tensors of one collective. They are zeros until they are filled; zeros cost a link as
    much as other numbers."""

    def __init__(
        self, kind: Collective, num_bytes: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self.kind = kind
        self.group = group
        self.device = device
        self.ranks = group.size()
        self.rank = group.rank()
        # Every rank gets the same number of elements: as many as fit.
        self.count = max(1, num_bytes // _ELEMENT // self.ranks)
        self.num_bytes = _ELEMENT * self.count * self.ranks
        part, whole = self.count, self.count * self.ranks
        self._sent = torch.zeros(part if kind == "all_gather" else whole, device=device)
        if kind == "all_reduce":
            self._arrived = self._sent
        else:
            self._arrived = torch.zeros(part if kind == "reduce_scatter" else whole, device=device)

    def run(self) -> None:
        """The collective itself."""
        # 2.13 gives the first two new names that 2.11 does not have.
        if self.kind == "all_gather":
            dist.all_gather_into_tensor(self._arrived, self._sent, group=self.group)
        elif self.kind == "reduce_scatter":
            dist.reduce_scatter_tensor(self._arrived, self._sent, group=self.group)
        elif self.kind == "all_reduce":
            dist.all_reduce(self._arrived, group=self.group)
        else:
            dist.all_to_all_single(self._arrived, self._sent, group=self.group)

    def fill(self) -> None:
        """Put this rank's pattern where the collective reads."""
        start = self.rank * self.count if self.kind == "all_gather" else 0
        self._sent.copy_(pattern(self.rank, start, self._sent.numel(), self.device))

    def clear(self) -> None:
        """Fill with zeros again: an all-reduce repeated on other numbers would overflow."""
        self._sent.zero_()

    def wrong(self) -> int:
        """The number of elements that are wrong after `fill` and one run."""
        chunks = self._arrived.split(self.count)
        return sum(int((chunk != self._right(i)).sum()) for i, chunk in enumerate(chunks))

    def _right(self, chunk: int) -> Tensor:
        """The right values of a chunk of the output."""
        if self.kind == "all_gather":
            return pattern(chunk, chunk * self.count, self.count, self.device)
        if self.kind == "all_to_all":
            return pattern(chunk, self.rank * self.count, self.count, self.device)
        place = self.rank if self.kind == "reduce_scatter" else chunk
        phase = _phase(place * self.count, self.count, self.device)
        return self.ranks * phase + _PERIOD * self.ranks * (self.ranks + 1) // 2


def _phase(start: int, count: int, device: torch.device) -> Tensor:
    indices = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return indices.remainder_(_PERIOD).float()
