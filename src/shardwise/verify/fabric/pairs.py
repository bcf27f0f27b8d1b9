"""Measure every pair of ranks in a domain, and every pair of domains, one way at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from shardwise.metrics.clock import Clock, Round
from shardwise.verify.fabric.exchange import pattern
from shardwise.verify.fabric.found import Flow, Pair

Couple = tuple[int, int]
_ELEMENT = 4


def rounds_of(count: int) -> Iterator[list[Couple]]:
    """All pairs out of `count`, in rounds in which nobody is in two pairs."""
    # This is a round-robin tournament: one stays, and the others rotate around it. With an odd
    # number one has no partner.
    seats: list[int | None] = [*range(count)] + [None] * (count % 2)
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in across if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure_pairs(clock: Clock, domain: int, num_bytes: int) -> list[Pair]:
    """Measure both ways of every pair, as a collective call. Every rank gets all results."""
    world = clock.world.size
    starts = range(0, world, domain)
    sender = Sender(clock, max(1, num_bytes // _ELEMENT))
    pairs: list[Pair] = []
    for couples in _both_ways(domain):
        members = [[(start + a, start + b)] for start in starts for a, b in couples]
        pairs += [Pair("inside", sender.num_bytes, flows) for flows in sender.measure(members)]
    for couples in _both_ways(world // domain):
        members = [[(a * domain + i, b * domain + i) for i in range(domain)] for a, b in couples]
        pairs += [Pair("between", sender.num_bytes, flows) for flows in sender.measure(members)]
    return pairs


class Sender:
    """Lets some ranks send to others, all at the same time."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock = clock
        self.rank = clock.world.rank
        self.num_bytes = _ELEMENT * count
        self._sent = pattern(self.rank, 0, count, clock.device)
        self._arrived = torch.empty_like(self._sent)

    def measure(self, members: Sequence[Sequence[Couple]]) -> list[tuple[Flow, ...]]:
        """Send from the first to the second rank of each pair. No rank is in two pairs.

        Pairs that share a link are grouped, and lead from one machine to one other.
        """
        mine = next((couple for each in members for couple in each if self.rank in couple), None)
        work = self._work(mine)
        self._arrived.zero_()
        work()
        wrong = torch.zeros(self.clock.world.size, dtype=torch.int64)
        if mine is not None and self.rank == mine[1]:
            expected = pattern(mine[0], 0, self._arrived.numel(), self.clock.device)
            wrong[self.rank] = (self._arrived != expected).sum().cpu()
        dist.all_reduce(wrong, group=self.clock.world.group)
        found = self.clock.one_round(work)
        return [
            tuple(
                Flow(*couple, seconds, int(wrong[couple[1]]))
                for couple, seconds in zip(each, shared_seconds(each, found), strict=True)
            )
            for each in members
        ]

    def _work(self, couple: Couple | None) -> Callable[[], None]:
        if couple is None:
            return lambda: None
        sender, receiver = couple
        operation = (
            dist.P2POp(dist.isend, self._sent, receiver)
            if self.rank == sender
            else dist.P2POp(dist.irecv, self._arrived, sender)
        )

        def work() -> None:
            for request in dist.batch_isend_irecv([operation]):
                request.wait()

        return work


def shared_seconds(couples: Sequence[Couple], found: Round) -> list[float]:
    """The seconds of each flow, counted from the start of the first one.

    A flow that begins late has the link to itself at its end, but the link carries no more for it.
    """
    first = [min(found.begun[couple[side]] for couple in couples) for side in (0, 1)]
    return [
        max(found.ended[couple[side]] - first[side] for side in (0, 1)) / found.calls
        for couple in couples
    ]


def _both_ways(count: int) -> Iterator[list[Couple]]:
    for couples in rounds_of(count):
        yield couples
        yield [(b, a) for a, b in couples]
