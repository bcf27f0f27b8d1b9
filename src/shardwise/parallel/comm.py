"""The collectives of every unit, handed to one object through FSDP2's public hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwise.model.blocks import UnitMap, iter_modules


class Carrier(Protocol):
    """Calls the collectives of a model in FSDP2's place; the tensors come as keywords."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of a collective, as FSDP2 asks for it itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def all_gather(
        self,
        unit: str,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather the parameters of a unit."""

    def reduce_scatter(
        self,
        unit: str,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum the gradients of a unit."""

    def all_reduced(self, unit: str, group: ProcessGroup, gradients: Tensor) -> None:
        """FSDP2 calls its all-reduce over the replicas itself, and this right after it."""


def apply_carrier(model: nn.Module, units: UnitMap, mesh: DeviceMesh, carrier: Carrier) -> None:
    """Have the collectives of every unit, and of the root, go through `carrier`."""
    modules = {unit.name: next(iter_modules(model, unit)) for unit in units.units}
    for name, module in {**modules, "the root": model}.items():
        if not isinstance(module, FSDPModule):
            continue
        apply_to_unit(module, name, carrier)
        if mesh.ndim > 1:
            replicas = mesh.get_group("replicate")
            module.set_all_reduce_hook(partial(carrier.all_reduced, name, replicas))


def apply_to_unit(module: FSDPModule, name: str, carrier: Carrier) -> None:
    """Have one unit's all-gathers and reduce-scatters go through `carrier`."""
    gather, scatter = partial(carrier.all_gather, name), partial(carrier.reduce_scatter, name)
    # Their protocol is public, the classes that spell it out are not; it is met by shape.
    module.set_custom_all_gather(cast(Any, _Comm(carrier.allocate, gather)))
    module.set_custom_reduce_scatter(cast(Any, _Comm(carrier.allocate, scatter)))


def reduce_in_place(module: FSDPModule) -> None:
    """Where one rank trains alone, a sum over ranks is what goes into it. Given one memory for
    both, FSDP2 has nothing to copy."""
    module.set_custom_reduce_scatter(cast(Any, _Comm(_OneMemory(), _never)))


class _OneMemory:
    """Memory that is asked for twice in a row, for what a collective takes and what it gives."""

    def __init__(self) -> None:
        self._taken: Tensor | None = None

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken, self._taken = self._taken, None
        if taken is not None and taken.shape == torch.Size(size) and taken.dtype == dtype:
            return taken
        self._taken = torch.empty(*size, dtype=dtype, device=device)
        return self._taken


def _never(**tensors: Any) -> None:
    raise AssertionError("FSDP2 calls no collective of a group of one")


@dataclass(frozen=True, slots=True)
class _Comm:
    """FSDP2's `Comm`: it asks for the memory of a collective, and then calls it."""

    allocate: Callable[..., Tensor]
    call: Callable[..., Any]

    def __call__(self, **tensors: Any) -> Any:
        return self.call(**tensors)
