"""The collectives of every unit, passed to one object through FSDP2's public hooks.

FSDP2 calls its own collectives wherever nothing here is needed: hooks for a unit's collectives rule
out FSDP2's symmetric memory, and parameters of one unit on several meshes.
"""

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

from shardwise.internals.parts import REDUCTIONS, is_open
from shardwise.model.blocks import UnitMap, iter_modules
from shardwise.parallel.dispatch import AllToAll
from shardwise.parallel.expert_parallel import dispatched_experts
from shardwise.parallel.gather import IntoParameters, can_gather_into, gathers_in_place
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.reduce_buffer import BufferedInputs, ReduceBuffer
from shardwise.plan.planned import Plan


class Carrier:
    """Calls the collectives of a model in FSDP2's place, here as FSDP2 would."""

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

    def all_to_all(self, group: ProcessGroup) -> AllToAll:
        """What carries tokens to the experts of other ranks."""
        return AllToAll(group)

    def all_reduced(self, unit: str, group: ProcessGroup, gradients: Tensor) -> None:
        """Called right after FSDP2's own all-reduce over the replicas."""


def apply_carrier(
    model: nn.Module,
    units: UnitMap,
    plan: Plan,
    mesh: Mesh,
    given: Carrier | None,
    buffer: ReduceBuffer | None = None,
) -> None:
    """Let one carrier call the collectives of every unit and of the root: the `given` one, or a
    plain one where this plan needs any. Inputs of reduce-scatters come from `buffer`, where there
    is one."""
    # With replicas a third stream all-reduces in the same memory, and nothing here could wait for
    # it.
    shares = mesh.replicas is None and is_open(REDUCTIONS)
    in_place = gathers_in_place(plan)
    needs_any = in_place or buffer or (shares and plan.cluster.device == "cuda")
    # FSDP2 calls no collective of a group of one, and its gradients are reduced in place.
    if mesh.fsdp.size() == 1 or (given is None and not needs_any):
        return
    carrier = given or Carrier()
    modules = {unit.name: list(iter_modules(model, unit)) for unit in units.units}
    modules |= {"the root": [model], **_gathered_experts(model, mesh)}
    for name, (module, *others) in modules.items():
        if not isinstance(module, FSDPModule):
            continue
        places = in_place and can_gather_into([module, *others])
        apply_to_unit(module, name, carrier, shares=shares, in_place=places, buffer=buffer)
        if mesh.replicas is not None:
            module.set_all_reduce_hook(partial(carrier.all_reduced, name, mesh.replicas))


def _gathered_experts(model: nn.Module, mesh: Mesh) -> dict[str, list[nn.Module]]:
    """Experts that are units of their own, by name, where several ranks have the same ones."""
    if mesh.fsdp_over_experts["shard"].size() == 1:
        return {}
    own = set(dispatched_experts(model))
    return {name: [module] for name, module in model.named_modules() if module in own}


def apply_to_unit(
    module: FSDPModule,
    name: str,
    carrier: Carrier,
    *,
    shares: bool = True,
    in_place: bool = False,
    buffer: ReduceBuffer | None = None,
) -> None:
    """Let `carrier` call one unit's all-gathers and reduce-scatters.

    With `shares`, the result of a reduce-scatter takes memory of the compute stream, which
    activations have left.
    """
    gather, scatter = partial(carrier.all_gather, name), partial(carrier.reduce_scatter, name)
    # FSDP2's protocol for this is public, but its classes are not, so it is met by duck typing.
    if in_place:
        module.set_custom_all_gather(cast(Any, IntoParameters(carrier.allocate, gather)))
    else:
        flat = _Comm(carrier.allocate, partial(_gather_flat, gather))
        module.set_custom_all_gather(cast(Any, flat))
    allocate = ComputeMemory(carrier.allocate) if shares else carrier.allocate
    if buffer is None:
        comm = _Comm(allocate, scatter)
    else:
        comm = _Comm(BufferedInputs(buffer, allocate), partial(_scatter_noted, scatter, buffer))
    module.set_custom_reduce_scatter(cast(Any, comm))


def reduce_alone(module: FSDPModule, plan: Plan) -> None:
    """Set up the reductions of a rank that is alone: in place, unless gradients go on to the host.

    FSDP2 copies those on the stream that reduces, behind the event after which it frees the input.
    In place that is the memory that is being copied, and compute would write to it meanwhile.
    """
    if not plan.decided.offload:
        reduce_in_place(module, torch.device(plan.cluster.device))


def reduce_in_place(module: FSDPModule, device: torch.device) -> None:
    """Give the input and the output of a reduction one buffer, for a rank that is alone. The sum is
    then the input itself, and FSDP2 has nothing to copy.

    Call it on the stream that will compute.
    """
    if is_open(REDUCTIONS):
        computes = torch.get_device_module(device).current_stream()
        module.set_custom_reduce_scatter(cast(Any, _Comm(OneMemory(computes), _never)))


@dataclass(frozen=True, slots=True)
class ComputeMemory:
    """Memory of the compute stream, whichever stream allocates.

    FSDP2 allocates the output of a reduce-scatter on the stream that reduces. The caching allocator
    keeps a pool for each stream, so all gradient shards would come on top of the activations, whose
    memory they could reuse.

    This is right for any caller and any order. The stream that allocates first waits for the
    compute stream, so all earlier work on that memory is done. `record_stream` makes the allocator
    wait for the allocating stream before it reuses the memory. On a GPU shardwise computes on the
    default stream only.
    """

    allocate: Callable[..., Tensor]

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, with the arguments that FSDP2 passes."""
        asked: dict[str, Any] = {"dtype": dtype, "device": device}
        if device.type != "cuda":
            return self.allocate(size, **asked)
        computes, asks = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
        if asks == computes:
            return self.allocate(size, **asked)
        asks.wait_stream(computes)
        with torch.cuda.stream(computes):
            memory = self.allocate(size, **asked)
        memory.record_stream(asks)
        return memory


class OneMemory:
    """One buffer for the input and the output of a reduction over a group of one rank.

    FSDP2 copies the gradients of a unit into the input, copies the input to the output, and makes
    the sharded gradients views of the output. A tensor that is copied to itself does not change, so
    both may be one tensor.

    FSDP2 allocates the input on the compute stream, and the output on another one. A buffer for the
    compute stream is always new, so it never holds gradients. For another stream it is the last
    input, once, if shape and dtype are the same. Otherwise it is new, and FSDP2 copies.
    """

    def __init__(self, computes: Any) -> None:
        self._computes = computes
        self._input: Tensor | None = None

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, with the arguments that FSDP2 passes."""
        is_input = torch.get_device_module(device).current_stream() == self._computes
        given, self._input = self._input, None
        if given is None or is_input or (given.shape, given.dtype) != (torch.Size(size), dtype):
            given = torch.empty(*size, dtype=dtype, device=device)
        if is_input:
            self._input = given
        return given


def _gather_flat(
    gather: Callable[..., Any], *, output_tensor: Tensor, input_tensor: Tensor, **how: Any
) -> Any:
    """The all-gather as FSDP2 calls it: all parameters of a unit in one buffer."""
    return gather(outputs=[output_tensor], inputs=[input_tensor], **how)


def _scatter_noted(scatter: Callable[..., Any], buffer: ReduceBuffer, **tensors: Any) -> Any:
    """The reduce-scatter of an input that lies in `buffer`."""
    work = scatter(**tensors)
    buffer.note_read()
    return work


def _never(**tensors: Any) -> None:
    raise AssertionError("FSDP2 calls no collective of a group of one")


@dataclass(frozen=True, slots=True)
class _Comm:
    """FSDP2's `Comm`: it allocates the buffer of a collective, and then calls it."""

    allocate: Callable[..., Tensor]
    call: Callable[..., Any]

    def __call__(self, **tensors: Any) -> Any:
        return self.call(**tensors)
