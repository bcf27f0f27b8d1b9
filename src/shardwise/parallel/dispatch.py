"""Rows of tokens travel to the ranks of their experts, and what these make of them comes back.

Experts are dealt out to the ranks of a group, which hold different tokens. A rank sorts its rows by
expert, so that the rows of each other rank lie together, and sends them in one all-to-all. What it
receives lies by rank and then by expert. It is sorted by expert, and after the experts' matmuls it
returns by the same ways.

Nothing is dropped, and no buffer is larger than its rows. So each rank must know how many rows
come, and the host must know it too, because it allocates and launches. Counts travel first, and the
host reads them once for each call. A buffer for the worst case would need no reading, and would be
as many times larger as the group has ranks. A rank that gets no row works on one of zeros, so that
no kernel is launched over nothing.

An all-to-all is started and waited for in two functions of autograd. What is computed between them
runs beside it, in backward as well: there the wait starts the way back, and the start waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.internals.tensor_collectives import arrived, exchanging
from shardwise.kernels.experts import sum_rows
from shardwise.model.expert_rows import sort_by_expert


class AllToAll:
    """The all-to-alls of the ranks that share the experts of a block."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.num_ranks: int = group.size()

    def exchange_counts(self, counts: Tensor, num_rows: int) -> tuple[Tensor, list[int], list[int]]:
        """(what each rank sends for each expert of this one, the rows that go to each rank, those
        that come from it), from how many of the rows here go to each of all experts. The host waits
        for the device."""
        each = [len(counts) // self.num_ranks] * self.num_ranks
        arriving = self.finish(self.start(counts, each, each))
        both = torch.stack((counts, arriving)).view(2, self.num_ranks, -1)
        sent, received = both.sum(-1).tolist()
        return both[1], sent, received

    def start(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Begin to exchange rows. Only `finish` may read the result."""
        return exchanging(rows, received, sent, self.group.group_name)

    def finish(self, pending: Tensor) -> Tensor:
        """The rows that were exchanged."""
        return arrived(pending)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The ways of the rows of one call: from this rank's tokens to experts, and back."""

    ways: AllToAll
    order: Tensor
    """The place among all choices of all tokens of each row that leaves, sorted by expert."""

    tokens: Tensor
    """The token of each of these rows."""

    places: Tensor
    """Where each of a token's rows is among them."""

    sent: list[int]
    received: list[int]
    sorted_from: Tensor
    """Where each row of this rank's experts, sorted by expert, was when it arrived."""

    sorted_to: Tensor
    """Where each row that arrived is then, in a dim of its own."""

    experts: Tensor
    """The expert of each row, counted from this rank's first."""

    ends: Tensor
    """Where the rows of each of this rank's experts end."""

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, ways: AllToAll) -> Dispatch:
        """The ways for tokens that have chosen these of all experts. All ranks call this
        together."""
        order, _, places, ends = sort_by_expert(chosen, num_experts)
        counts = ends.diff(prepend=ends.new_zeros(1))
        arriving, sent, received = ways.exchange_counts(counts, len(order))
        held = arriving.shape[1]
        own = torch.arange(held, device=chosen.device, dtype=torch.int16).repeat(ways.num_ranks)
        came = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
        if not len(came):
            came = own[:1]
        sorted_from, experts, sorted_to, own_ends = sort_by_expert(came[:, None], held)
        tokens = order // chosen.shape[1]
        leaving = order, tokens, places, sent, received
        return cls(ways, *leaving, sorted_from, sorted_to, experts, own_ends)

    def send(self, x: Tensor, weights: Tensor) -> Sent:
        """Tokens set out for their experts, each with its expert's weight of all choices."""
        rows = self._depart(_Dealt.apply(x, self.tokens, self.places))
        return Sent(self, rows, self._depart(weights.reshape(-1).index_select(0, self.order)))

    def bring_back(self, made: Tensor) -> Tensor:
        """For each of this rank's tokens, the sum of what its experts have made of it."""
        rows = _Summed.apply(made, self.sorted_from, self.sorted_to)
        rows = rows[: sum(self.received)]
        crossing = _Crossing(self.ways, sent=self.received, received=self.sent)
        returned = _Travelling.over(crossing, rows).arrive()
        return _Summed.apply(returned, self.tokens, self.places)

    def _depart(self, rows: Tensor) -> _Travelling:
        return _Travelling.over(_Crossing(self.ways, self.sent, self.received), rows)


@dataclass(frozen=True, slots=True)
class Sent:
    """Rows and their weights on the way. What is computed before they are taken runs beside it."""

    trip: Dispatch
    rows: _Travelling
    weights: _Travelling

    def take(self) -> tuple[Tensor, Tensor]:
        """The rows of this rank's experts, sorted by expert, from the tokens of all ranks, and the
        weight of each."""
        rows, weights = self.rows.arrive(), self.weights.arrive()
        if not len(rows):
            rows, weights = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 1))
        sorted_from, sorted_to = self.trip.sorted_from, self.trip.sorted_to
        return _Dealt.apply(rows, sorted_from, sorted_to), weights.index_select(0, sorted_from)


class _Dealt(torch.autograd.Function):
    """Row i is row tokens[i] of what is given; `places` says where each given row has gone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(grads[0].contiguous(), *ctx.saved_tensors), None, None


class _Summed(torch.autograd.Function):
    """The way back: row i is the sum of the rows that places[i] lists."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        # A recompute ends with the last tensor that was saved. These few numbers are not saved, so
        # that it need not send rows back only to reach them.
        ctx.tokens = tokens
        return sum_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.tokens), None, None


@dataclass(slots=True)
class _Crossing:
    """One all-to-all, and in backward its way back."""

    ways: AllToAll
    sent: list[int]
    received: list[int]
    returning: Tensor | None = None
    """Gradients on their way back."""


@dataclass(frozen=True, slots=True)
class _Travelling:
    """What one all-to-all is carrying."""

    crossing: _Crossing
    pending: Tensor

    @classmethod
    def over(cls, crossing: _Crossing, rows: Tensor) -> _Travelling:
        return cls(crossing, _Departure.apply(rows, crossing))

    def arrive(self) -> Tensor:
        came: Tensor = _Arrival.apply(self.pending, self.crossing)
        return came


class _Departure(torch.autograd.Function):
    """Rows begin to travel. In backward, their gradients have come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.ways.start(rows, crossing.received, crossing.sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        returning, ctx.crossing.returning = ctx.crossing.returning, None
        return ctx.crossing.ways.finish(returning), None


class _Arrival(torch.autograd.Function):
    """Rows have come. In backward, their gradients begin to travel back.

    Autograd wants a gradient of the shape of what came. Gradients that travel have another, so they
    are left in the crossing.
    """

    @staticmethod
    def forward(ctx: Any, pending: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.ways.finish(pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        crossing = ctx.crossing
        crossing.returning = crossing.ways.start(grads[0], crossing.sent, crossing.received)
        return grads[0], None
