"""All-gathers straight into parameters.

FSDP2 gathers a unit into one buffer that is laid out by ranks, and copies each parameter out of it
on the compute stream. Here one call gathers each parameter into its own memory, its *place*, and
nothing is left to copy.

FSDP2 makes three calls for a unit (`internals/fsdp2.py`):

1. FSDP2 asks `IntoParameters` for the all-gather's output. The first time it gets a buffer, as it
   would without us. Later it gets one element that is expanded to the buffer's shape, because
   FSDP2 only reads the shape.
2. FSDP2 calls `fsdp::all_gather_copy_in` to copy the shards into that buffer. Where places are
   known `keep_shards` copies nothing, and keeps the shards for as long as FSDP2 keeps the buffer,
   because another stream reads them until then. Then FSDP2 calls the all-gather, which reads the
   shards and writes the places.
3. FSDP2 calls `fsdp::split_with_sizes_copy` with the memory of its parameters. The first time
   `copy_unless_there` learns from it where the places are; later it checks that they are the same,
   and copies nothing. FSDP2 resizes the storage of a gathered parameter to 0 and back, and never
   replaces it.

Operators see tensors only, so `_GATHERS` maps each buffer to its unit and its shards. An entry is
removed when its buffer is freed.

Places are memory of the compute stream, as they are in FSDP2. That memory may just have been used
by the block before, so a gather first waits for all work that was launched on the compute stream.
Compute hides the gather only if units are gathered one ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.internals.fsdp2 import base_of
from shardwise.internals.parts import GATHERS, is_open
from shardwise.kernels import unit_copies
from shardwise.parallel.expert_parallel import dispatched_experts
from shardwise.plan.planned import Plan


@dataclass(slots=True)
class Gather:
    """One all-gather in progress."""

    unit: IntoParameters
    shards: list[Tensor] | None = None
    """The shards that it reads, if it writes places; None if it uses FSDP2's buffer."""


_GATHERS = WeakTensorKeyDictionary()


def gathers_in_place(plan: Plan) -> bool:
    """Whether the plan gathers in place and this FSDP2 is one that we know."""
    return plan.decided.gather_in_place and is_open(GATHERS)


class IntoParameters:
    """FSDP2's `Comm` for the all-gathers of one unit."""

    def __init__(self, allocate: Callable[..., Tensor], gather: Callable[..., Any]) -> None:
        self._allocate, self._gather = allocate, gather
        self._places: list[Tensor] = []
        self._computes: Any = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the all-gather's buffer. Once places are known, FSDP2 only reads the buffer's
        shape."""
        memory = self._allocate([1] if self._places else size, dtype=dtype, device=device)
        _GATHERS[memory] = Gather(self)
        return memory.expand(size)

    @property
    def knows_places(self) -> bool:
        """Whether a first gather has shown where the parameters are."""
        return bool(self._places)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        """The all-gather."""
        gather = _gather_of(output_tensor)
        if gather is None or gather.shards is None:
            return self._gather(outputs=[output_tensor], inputs=[input_tensor], **how)
        self._take_places()
        return self._gather(outputs=self._places, inputs=gather.shards, **how)

    def is_in(self, places: Sequence[Tensor], gather: Gather) -> bool:
        """Whether this all-gather has written these places. If not, the next one will."""
        self._computes = _streams(places[0]).current_stream()
        if gather.shards is None:
            # These are new tensors over the same memory, because autograd counts writes through
            # FSDP2's.
            self._places = [place.data.view(-1) for place in places]
            return False
        found = [place.data_ptr() for place in places]
        if found != [place.data_ptr() for place in self._places]:
            raise AssertionError("FSDP2 has other memory for parameters than it had before")
        return True

    def _take_places(self) -> None:
        streams = _streams(self._places[0])
        with streams.stream(self._computes):
            for place in self._places:
                memory = place.untyped_storage()
                if memory.size() != place.nbytes:
                    memory.resize_(place.nbytes)
        streams.current_stream().wait_stream(self._computes)


def can_gather_into(modules: Sequence[nn.Module]) -> bool:
    """Whether all parameters of a unit are sharded along dim 0. FSDP2 assembles any others from a
    copy."""
    inner = [each for module in modules for each in dispatched_experts(module)]
    others = {p for each in inner if each not in modules for p in each.parameters()}
    params = (param for module in modules for param in module.parameters() if param not in others)
    return all(isinstance(each, DTensor) and each.placements[-1] == Shard(0) for each in params)


def keep_shards(shards: Sequence[Tensor], memory: Tensor, *_: Any) -> Any:
    """`fsdp::all_gather_copy_in`: keep the shards of a unit whose places are known, and leave
    all other units to FSDP2."""
    gather = _gather_of(memory)
    if gather is None or not gather.unit.knows_places:
        return NotImplemented
    gather.shards = list(shards)
    return memory, memory


def copy_unless_there(
    gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    """`fsdp::split_with_sizes_copy`: do nothing where the all-gather wrote into `out`, else copy
    by our kernel."""
    gather = _gather_of(gathered)
    if gather is None or not gather.unit.is_in(out, gather):
        unit_copies.split_with_sizes_copy(gathered, sizes, dim, out=out)


def _gather_of(view: Tensor) -> Gather | None:
    found: Gather | None = _GATHERS.get(base_of(view))
    return found


def _streams(tensor: Tensor) -> Any:
    return torch.get_device_module(tensor.device)
