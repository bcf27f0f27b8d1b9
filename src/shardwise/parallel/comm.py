"""The collectives of every unit, passed to one object through FSDP2's public hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.fsdp import FSDPModule

from shardwise.model.blocks import UnitMap, iter_modules
from shardwise.parallel.gather import IntoParameters, can_gather_into
from shardwise.parallel.mesh import Mesh
from shardwise.plan.plan import Plan


class Carrier:
    """Calls the collectives of a model in FSDP2's place. This one does what FSDP2 would; tensors
    come as keywords."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of a collective, as FSDP2 itself would."""
        return torch.empty(*size, dtype=dtype, device=device)

    def all_gather(
        self,
        unit: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """All-gather the parameters of a unit, in one call."""
        if len(outputs) == 1:
            return dist.all_gather_into_tensor(outputs[0], inputs[0], group, async_op)
        options = AllgatherOptions()
        options.asyncOp = async_op
        work = group.allgather_into_tensor_coalesced(list(outputs), list(inputs), options)
        if async_op:
            return work
        # NCCL returns no work for a synchronous call: later kernels on the same stream wait anyway.
        if work is not None:
            work.wait()
        return None

    def reduce_scatter(
        self,
        unit: str,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce-scatter the gradients of a unit."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

    def all_reduced(self, unit: str, group: ProcessGroup, gradients: Tensor) -> None:
        """Called right after FSDP2's own all-reduce over the replicas."""


def apply_carrier(
    model: nn.Module, units: UnitMap, plan: Plan, mesh: Mesh, carrier: Carrier
) -> None:
    """Let `carrier` call the collectives of every unit and of the root."""
    modules = {unit.name: list(iter_modules(model, unit)) for unit in units.units}
    for name, (module, *others) in {**modules, "the root": [model]}.items():
        if not isinstance(module, FSDPModule):
            continue
        in_place = plan.decided.gather_in_place and can_gather_into([module, *others])
        apply_to_unit(module, name, carrier, shares=mesh.replicas is None, in_place=in_place)
        if mesh.replicas is not None:
            module.set_all_reduce_hook(partial(carrier.all_reduced, name, mesh.replicas))


def apply_to_unit(
    module: FSDPModule, name: str, carrier: Carrier, *, shares: bool = True, in_place: bool = False
) -> None:
    """Let `carrier` call one unit's all-gathers and reduce-scatters.

    `shares` lets the result of a reduce-scatter take memory of the compute stream. Otherwise it has
    memory of its own, because the stream of an all-reduce over replicas uses it too, and nothing
    here could wait for that stream.
    """
    gather, scatter = partial(carrier.all_gather, name), partial(carrier.reduce_scatter, name)
    # FSDP2's protocol for this is public, but its classes are not, so it is met by duck typing.
    if in_place:
        module.set_custom_all_gather(cast(Any, IntoParameters(carrier.allocate, gather)))
    else:
        flat = _Comm(carrier.allocate, partial(_gather_flat, gather))
        module.set_custom_all_gather(cast(Any, flat))
    allocate = _Shared(carrier.allocate) if shares else carrier.allocate
    module.set_custom_reduce_scatter(cast(Any, _Comm(allocate, scatter)))


def reduce_in_place(module: FSDPModule) -> None:
    """For one rank alone, where a sum over ranks is its own input. With one buffer for both,
    FSDP2 has nothing to copy."""
    module.set_custom_reduce_scatter(cast(Any, _Comm(_OneMemory(), _never)))


class _Shared:
    """Allocates the result of a reduce-scatter from the compute stream's memory.

    FSDP2 allocates it on the stream of the reduction. The caching allocator keeps a pool for each
    stream, so gradient shards could not reuse the memory of freed activations and would come on top
    of them.
    """

    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate
        self._computes: Any = None

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked: dict[str, Any] = {"dtype": dtype, "device": device}
        if device.type != "cuda":
            return self._allocate(size, **asked)
        stream = torch.cuda.current_stream(device)
        if self._computes is None:
            # The first request is for the input, on the compute stream, which the other stream
            # waits for.
            self._computes = stream
            return self._allocate(size, **asked)
        with torch.cuda.stream(self._computes):
            memory = self._allocate(size, **asked)
        self._computes = None
        # If it is freed while the reduction still runs, the allocator reuses it only afterwards.
        memory.record_stream(stream)
        return memory


class _OneMemory:
    """One buffer for two requests in a row: the input and the output of a collective."""

    def __init__(self) -> None:
        self._taken: Tensor | None = None

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken, self._taken = self._taken, None
        if taken is not None and taken.shape == torch.Size(size) and taken.dtype == dtype:
            return taken
        self._taken = torch.empty(*size, dtype=dtype, device=device)
        return self._taken


def _gather_flat(
    gather: Callable[..., Any], *, output_tensor: Tensor, input_tensor: Tensor, **how: Any
) -> Any:
    """The all-gather as FSDP2 calls it: all parameters of a unit in one buffer."""
    return gather(outputs=[output_tensor], inputs=[input_tensor], **how)


def _never(**tensors: Any) -> None:
    raise AssertionError("FSDP2 calls no collective of a group of one")


@dataclass(frozen=True, slots=True)
class _Comm:
    """FSDP2's `Comm`: it allocates the buffer of a collective, and then calls it."""

    allocate: Callable[..., Tensor]
    call: Callable[..., Any]

    def __call__(self, **tensors: Any) -> Any:
        return self.call(**tensors)
