"""Collectives without peers: real data moves inside the device, then the modelled time passes.

They are put in through FSDP2's public hooks, so all else of the step is the real code: streams,
prefetching, buffers, copies in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwise.facts.fabric import Collective as Kind
from shardwise.model.blocks import UnitMap, iter_modules
from shardwise.tunnel.clock import Clock
from shardwise.tunnel.links import Links
from shardwise.tunnel.traffic import Collective, Traffic
from shardwise.tunnel.world import place_of


@dataclass(slots=True)
class Emulator:
    """Carries every collective of a model, and writes it down."""

    links: Links
    clock: Clock
    traffic: Traffic = field(default_factory=Traffic)
    free: bool = False
    """Links of infinite speed: the local copies remain, no time is added."""

    on_buffer: Callable[[Tensor], None] = lambda buffer: None
    """Told of every buffer that a collective is given."""

    def carry(
        self,
        kind: Kind,
        tensor: Tensor,
        group: dist.ProcessGroup,
        unit: str,
        work: Callable[[], None],
    ) -> None:
        """One collective over `group`; `tensor` is the whole of what it moves."""
        place, num_bytes = place_of(group), tensor.nbytes
        seconds = self.links.seconds(kind, num_bytes, place)
        self.traffic.add(Collective(kind, num_bytes, place.ranks, place.stride, seconds, unit))
        what = (kind, num_bytes, place)
        self.clock.carry(group.group_name, what, 0.0 if self.free else seconds, work)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """FSDP2's `Comm`: it asks for the memory of a collective, and then calls it."""

    emulator: Emulator
    unit: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.emulator.on_buffer(buffer)
        return buffer


class EmulatedAllGather(_Buffers):
    """Every other rank's shard is a copy of this one's.

    Real values, because a GPU multiplies zeros faster than numbers; as many bytes are written as a
    real all-gather writes.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill the slots of all other ranks."""

        def copy() -> None:
            # FSDP2 gathers in place: rank 0's own shard lies in the first slot already.
            output_tensor.view(group.size(), -1)[1:].copy_(input_tensor)

        self.emulator.carry("all_gather", output_tensor, group, self.unit, copy)


class EmulatedReduceScatter(_Buffers):
    """The sum over this rank's own slots: finite gradients, and the whole input is read."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's slot; every real reduction here is a sum."""

        def reduce() -> None:
            torch.sum(input_tensor.view(group.size(), -1), dim=0, out=output_tensor)

        self.emulator.carry("reduce_scatter", input_tensor, group, self.unit, reduce)


def apply_emulation(model: nn.Module, units: UnitMap, mesh: DeviceMesh, emulator: Emulator) -> None:
    """Replace the collectives of every unit and of the root."""
    modules = {unit.name: next(iter_modules(model, unit)) for unit in units.units}
    for name, module in {**modules, "the root": model}.items():
        if not isinstance(module, FSDPModule):
            continue
        # Their protocol is public, the classes that spell it out are not; it is met by shape.
        module.set_custom_all_gather(cast(Any, EmulatedAllGather(emulator, name)))
        module.set_custom_reduce_scatter(cast(Any, EmulatedReduceScatter(emulator, name)))
        if mesh.ndim > 1:
            # FSDP2 calls it after its own all-reduce over the replicas, which does nothing here.
            replicas = mesh.get_group("replicate")
            module.set_all_reduce_hook(partial(_all_reduce, emulator, replicas, name))


def _all_reduce(
    emulator: Emulator, replicas: dist.ProcessGroup, unit: str, gradients: Tensor
) -> None:
    emulator.carry("all_reduce", gradients, replicas, unit, lambda: None)
