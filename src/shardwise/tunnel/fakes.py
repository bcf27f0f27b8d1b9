"""Tensors without data: shapes, dtypes and lifetimes are real, and nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ExitCode, UserError
from shardwise.facts.collective_cost import Collective as Kind
from shardwise.internals.dispatch_mode import TorchDispatchMode, tree_map_only
from shardwise.internals.hugging_face import unsearched_positions
from shardwise.internals.peerless import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from shardwise.internals.private_names import DISPATCHED_CALLS, FSDP_COPIES, MOVE_NOTHING
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.ledger import Ledger, local
from shardwise.tunnel.memo import Memo
from shardwise.tunnel.traffic import Collective, Traffic
from shardwise.tunnel.world import place_of

_DEVICE = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default
# Operators of ours that are one collective each. They take a group's name, second.
OWN_COLLECTIVES: dict[str, Kind] = {
    "shardwise::gather_rows": "all_gather",
    "shardwise::all_rows": "all_gather",
    "shardwise::all_columns": "all_gather",
    "shardwise::sum_to_rows": "reduce_scatter",
    "shardwise::sum_parts": "all_reduce",
}
# Operators of clipping and Adam over all parameters at once, each rank on its own shards.
_UPDATES = frozenset({torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._fused_adamw_.default})


class OperatorObserver(TorchDispatchMode):
    """Sees every operator: new storages, and the collectives that FSDP2 has no hook for."""

    def __init__(
        self, ledger: Ledger, traffic: Traffic, links: Links, groups: Iterable[dist.ProcessGroup]
    ) -> None:
        super().__init__()
        self._ledger = ledger
        self._traffic = traffic
        self._links = links
        self._memo = Memo()
        self._groups = {str(group.group_name): group for group in groups}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, and record its new storages."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            # This is asked tens of thousands of times a step, and answered here at a tenth of the
            # cost.
            return args[0].fake_device
        if DTensor in types:
            # It becomes operators on this rank's shard, which come here again.
            return _shard_by_shard(func, args, kwargs) if func in _UPDATES else NotImplemented
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # So do float8 tensors, on the tensors that they wrap.
            return NotImplemented
        if func is _READ and self._ledger.moment not in ("forward", "loss"):
            # The step reads a gradient norm or a request to stop from the device: it reads 0. What
            # a model would decide by values is not guessed.
            return 0.0 if args[0].dtype.is_floating_point else 0
        name = _name_of(func)
        if name in FSDP_COPIES:
            # Where no cast is needed, the inputs of an all-gather are the parameters themselves.
            inputs = (tensor for tensor in args[0] if self._ledger.class_of(tensor) != "params")
            self._ledger.classify(inputs, "gathered")
        if name.startswith("aten::"):
            result = self._memo.run(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if "c10d" in name and name not in MOVE_NOTHING:
            self._note_collective(name, args)
        if name in OWN_COLLECTIVES:
            self._note_own(name, args, result)
        for tensor in _tensors_in(result):
            self._ledger.note(tensor)
        return result

    def _note_collective(self, name: str, args: Sequence[Any]) -> None:
        if name not in DISPATCHED_CALLS:
            raise NotImplementedError(f"the tunnel does not know what {name} moves")
        (tensor, *_) = _tensors_in(args[0])
        if self._ledger.class_of(tensor) == "gathered":
            # This is one of FSDP2's buffers: the emulator records its collective, with its unit.
            return
        kind, group = DISPATCHED_CALLS[name], self._group_in(args)
        # Functional collectives take the input first, the others the output.
        if kind in ("all_gather", "reduce_scatter") and name.startswith("c10d"):
            tensor = max(_tensors_in(args[:2]), key=lambda each: each.nbytes)
        elif kind == "all_gather":
            self._add(kind, tensor.nbytes * group.size(), group)
            return
        self._add(kind, tensor.nbytes, group)

    def _note_own(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        whole = max(args[0].nbytes, result.nbytes)
        self._add(OWN_COLLECTIVES[name], whole, self._groups[args[1]])

    def _add(self, kind: Kind, num_bytes: int, group: dist.ProcessGroup) -> None:
        place = place_of(group)
        if place.ranks > 1:
            seconds = self._links.seconds(kind, num_bytes, place)
            shape, axis = (place.ranks, place.stride), self._traffic.groups.axis_of(kind, group)
            self._traffic.add(Collective(kind, num_bytes, *shape, seconds, axis, ""))

    def _group_in(self, args: Sequence[Any]) -> dist.ProcessGroup:
        """Functional collectives take a group's name, last; the others a boxed group, first of
        what is boxed."""
        if isinstance(args[-1], str):
            return self._groups[args[-1]]
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(boxed)
        return group


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside the block new tensors have no data."""
    try:
        # Without values in the positions, transformers would assume the worst and build a mask.
        with unsearched_positions(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            "this model cannot run on fake tensors",
            why=f"what it does next depends on values that are not there: {error}",
            fix="run the tunnel on a machine with a GPU",
            code=ExitCode.ENVIRONMENT,
        ) from error


def _shard_by_shard(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """An in-place update of whole lists, on the shards themselves.

    DTensor does the same after it has inferred shapes, which takes time that grows with the square
    of the number of parameters: for Llama 3.1 405B longer than its forward takes here.
    """
    sharded = [tensor for tensor in _tensors_in(args) if isinstance(tensor, DTensor)]
    if any(placement.is_partial() for tensor in sharded for placement in tensor.placements):
        return NotImplemented
    func(*(tree_map_only(Tensor, local, arg) for arg in args), **(kwargs or {}))
    return None


@cache
def _name_of(func: Any) -> str:
    name: str = func.name()
    return name.split(".")[0]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
