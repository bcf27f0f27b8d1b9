"""All-gathers that write straight into parameters.

FSDP2 all-gathers a unit into one buffer that is laid out by ranks, and then copies each parameter
out of it on the compute stream. Here one call gathers each parameter into the parameter's own
memory, and no copy is left. FSDP2's first copy shows where that memory is. Later FSDP2 calls its
copy again, which finds the data in place and does nothing.

Parameters still have memory of the compute stream, which may have belonged to the block before. So
a gather begins after all work that the compute stream was given so far. To be hidden, a unit has to
be gathered one unit ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.kernels import unit_copies


class IntoParameters:
    """FSDP2's `Comm` for the all-gathers of one unit."""

    def __init__(self, allocate: Callable[..., Tensor], gather: Callable[..., Any]) -> None:
        self._allocate, self._gather = allocate, gather
        self._places: list[Tensor] = []
        self._computes: Any = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the all-gather's buffer. Once the parameters' memory is known, FSDP2 only
        reads the buffer's shape."""
        memory = self._allocate([1] if self._places else size, dtype=dtype, device=device)
        memory.unit = self  # type: ignore[attr-defined]
        return memory.expand(size)

    def hand_in(self, memory: Tensor, shards: Sequence[Tensor]) -> bool:
        """Whether these shards are gathered from where they are.

        The shards are kept alive for as long as FSDP2 keeps the buffer, because another stream
        reads them.
        """
        if self._places:
            memory.shards = list(shards)  # type: ignore[attr-defined]
        return bool(self._places)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        """The all-gather."""
        shards = _shards_in(_memory_of(output_tensor))
        if shards is None:
            return self._gather(outputs=[output_tensor], inputs=[input_tensor], **how)
        self._take_places()
        return self._gather(outputs=self._places, inputs=shards, **how)

    def is_in(self, places: Sequence[Tensor], memory: Tensor) -> bool:
        """Whether `memory` was gathered into these parameters. If not, it will be the next time."""
        self._computes = _streams(memory).current_stream()
        if _shards_in(memory) is None:
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


def can_gather_into(modules: Iterable[nn.Module]) -> bool:
    """Whether a parameter is cut into rows. FSDP2 assembles any other one from a copy."""
    params = (param for module in modules for param in module.parameters())
    return all(isinstance(each, DTensor) and each.placements[-1] == Shard(0) for each in params)


def all_gather_copy_in(
    shards: Sequence[Tensor], memory: Tensor, sizes: Sequence[int], numel: int, rank: int
) -> tuple[Tensor, Tensor]:
    """FSDP2's copy of a unit's shards into the all-gather's input, where it is needed."""
    unit = _unit_of(memory)
    if unit is not None and unit.hand_in(_memory_of(memory), shards):
        return memory, memory
    taken = memory.narrow(0, numel * rank, numel)
    with torch.no_grad():
        torch._foreach_copy_(taken.split(list(sizes)), list(shards))
    return taken, memory


def split_with_sizes_copy(
    gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    """FSDP2's copy of gathered parameters out of the buffer, where it is needed."""
    unit = _unit_of(gathered)
    if unit is None or not unit.is_in(out, _memory_of(gathered)):
        unit_copies.split_with_sizes_copy(gathered, sizes, dim, out=out)


def _memory_of(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def _shards_in(memory: Tensor) -> list[Tensor] | None:
    return getattr(memory, "shards", None)


def _unit_of(view: Tensor) -> IntoParameters | None:
    return getattr(_memory_of(view), "unit", None)


def _streams(tensor: Tensor) -> Any:
    return torch.get_device_module(tensor.device)
