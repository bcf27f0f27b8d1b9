"""Collectives without peers: real data moves inside the device, then the modelled time passes.

They are installed through FSDP2's public hooks, so everything else of the step is the real code:
streams, prefetching, buffers, copies in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardwise.facts.collective_cost import Collective as Kind
from shardwise.metrics.labels import along_label, collective_label
from shardwise.parallel.comm import Carrier
from shardwise.parallel.dispatch import AllToAll
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.link_clock import LinkClock
from shardwise.tunnel.traffic import Collective, Traffic
from shardwise.tunnel.world import place_of


@dataclass(slots=True)
class Emulator(Carrier):
    """Carries every collective of a model, and records it."""

    links: Links
    clock: LinkClock
    traffic: Traffic = field(default_factory=Traffic)
    free: bool = False
    """Links of infinite speed: the local copies remain, no time is added."""

    on_buffer: Callable[[Tensor], None] = lambda buffer: None
    """Told of every buffer that a collective is given."""

    def carry(
        self,
        kind: Kind,
        num_bytes: int,
        group: dist.ProcessGroup,
        unit: str,
        work: Callable[[], None],
    ) -> None:
        """Carry one collective over `group`. `num_bytes` is the whole tensor's size."""
        place = place_of(group)
        seconds = self.links.seconds(kind, num_bytes, place)
        shape, axis = (place.ranks, place.stride), self.traffic.groups.axis_of(kind, group)
        self.traffic.add(Collective(kind, num_bytes, *shape, seconds, axis, unit))
        what = (kind, num_bytes, place)
        along = record_function(along_label(axis, num_bytes)) if axis else nullcontext()
        with along, record_function(collective_label(kind)):
            self.clock.carry(group.group_name, what, 0.0 if self.free else seconds, work)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as FSDP2 itself does, and tell `on_buffer`."""
        buffer = Carrier.allocate(self, size, dtype=dtype, device=device)
        self.on_buffer(buffer)
        return buffer

    def all_gather(
        self,
        unit: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Copy this rank's shard into every other rank's slot.

        The values are real, because a GPU multiplies zeros faster than other numbers. As many bytes
        are written as a real all-gather writes.
        """

        def copy() -> None:
            for output, shard in zip(outputs, inputs, strict=True):
                flat, own = output.view(-1), shard.view(-1)
                # Where FSDP2 gathers into one buffer, its first slot is rank 0's own shard.
                first = int(own.is_set_to(flat[: own.numel()]))
                word = _word(output, shard)
                output.view(word).view(group.size(), -1)[first:].copy_(shard.view(word))

        self.carry("all_gather", sum(each.nbytes for each in outputs), group, unit, copy)

    def reduce_scatter(
        self,
        unit: str,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum this rank's own slots. The gradients are finite, and the whole input is read."""

        def reduce() -> None:
            torch.sum(input_tensor.view(group.size(), -1), dim=0, out=output_tensor)

        self.carry("reduce_scatter", input_tensor.nbytes, group, unit, reduce)

    def all_reduced(self, unit: str, group: dist.ProcessGroup, gradients: Tensor) -> None:
        """Let the time of an all-reduce pass. FSDP2's own all-reduce does nothing here."""
        self.carry("all_reduce", gradients.nbytes, group, unit, lambda: None)

    def all_to_all(self, group: dist.ProcessGroup) -> AllToAll:
        """What tokens of a mixture of experts go through."""
        return EvenAllToAll(group, self)


class EvenAllToAll(AllToAll):
    """All-to-alls of experts that get equally many rows, from every rank. This rank's own rows are
    what it receives."""

    def __init__(self, group: dist.ProcessGroup, emulator: Emulator) -> None:
        super().__init__(group)
        self._emulator = emulator

    def exchange_counts(self, counts: Tensor, num_rows: int) -> tuple[Tensor, list[int], list[int]]:
        """As many rows for every rank and expert, whatever the router says. The host reads nothing,
        which a real run does once."""
        each = _even(num_rows, self.num_ranks)
        held = len(counts) // self.num_ranks
        arriving = [_even(rows, held) for rows in each]
        return torch.tensor(arriving, device=counts.device), each, each

    def start(self, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Copy the rows, and let the time pass."""
        arrived = torch.empty_like(rows)

        def copy() -> None:
            arrived.copy_(rows)

        self._emulator.carry("all_to_all", rows.nbytes, self.group, "experts", copy)
        return arrived

    def finish(self, pending: Tensor) -> Tensor:
        """The rows; they have arrived."""
        return pending


def _even(count: int, parts: int) -> list[int]:
    return [(count + part) // parts for part in range(parts)]


def _word(output: Tensor, shard: Tensor) -> torch.dtype:
    """8-byte words where shards begin and end at them: a device copies those at full speed."""
    ends = shard.nbytes, *(each.storage_offset() * each.itemsize for each in (output, shard))
    return torch.int64 if all(end % 8 == 0 for end in ends) else shard.dtype
