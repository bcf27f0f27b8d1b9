"""First weights, one unit at a time. No rank ever holds more than its shards and one unit.

Random weights come from the family's own initialiser, which runs on a full copy of one unit. Each
module is seeded by its name, so every world size, strategy and unit size starts from the same
model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from shardwise.errors import UserError
from shardwise.internals.hugging_face import initialise_module
from shardwise.kernels.packed_rows import Packing, pack_into
from shardwise.model.blocks import UnitMap
from shardwise.model.boxes import Box, whole_box
from shardwise.model.cuts import Cut, cuts_of
from shardwise.model.packed import as_rows, in_rows, packing_of, shape_of_floats, turned
from shardwise.model.seeds import seed_generators


def allocate_shards(model: nn.Module, device: torch.device, *, buffers_on: torch.device) -> None:
    """Give the meta model real but uninitialised storage: each rank's own shards only.

    With CPU offload the shards live on the host, while buffers are used where compute happens.
    """
    tied = [names for names in tied_names(model) if len(names) > 1]
    model.to_empty(device=device)
    for first, *others in tied:
        param = model.get_parameter(first)
        # FSDP2 keeps its own parameters tied; any others are several by now.
        for name in others if not isinstance(param, DTensor) else []:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, param)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(buffers_on))


def validate_ties(model: nn.Module, before: set[tuple[str, ...]]) -> None:
    """Raise where sharding has split one tied parameter into several."""
    if broken := sorted(before - tied_names(model)):
        raise UserError(
            f"sharding would untie {' and '.join(sorted(broken[0]))}",
            why="FSDP2 keeps a parameter tied only inside one unit",
            fix="name a class that holds all of them: shard.unit_classes=[CLASS]",
        )


def tied_names(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {tuple(group) for group in names.values()}


def initialise_weights(
    model: nn.Module, twin: PreTrainedModel, units: UnitMap, *, seed: int, device: torch.device
) -> None:
    """Fill the sharded `model` from its unsharded meta `twin`, one unit of it at a time."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    targets = portions_of(model, params | dict(model.named_buffers()))
    for members in _unit_members(twin, units):
        owned = (
            f"{name}.{key}" for name, m in members for key, _ in m.named_parameters(recurse=False)
        )
        if not targets.keys().isdisjoint(owned):
            _fill_unit(targets, twin, members, device, seed)
    initialise_buffers(model, twin, device, seed=seed)


def initialise_buffers(
    model: nn.Module, twin: PreTrainedModel, device: torch.device, *, seed: int = 0
) -> None:
    """Compute buffers that no file holds, such as rotary frequencies and masks, and the first
    values of buffers that files do hold. Parameters stay.

    All are computed at once, because a family may fill a buffer from a module far above the one
    that holds it.
    """
    members = [(name, m) for name, m in twin.named_modules() if any(True for _ in m.buffers())]
    full = {key: value for member in members for key, value in _real_buffers(*member, device)}
    with _own_random_state(device):
        _run_initialisers(twin, members, seed)
    targets = dict(model.named_buffers())
    # A rank that has a part of the blocks has a part of their buffers.
    for key in full.keys() & targets.keys():
        # Buffers are looked up by name, because an initialiser may have replaced the tensor.
        copy_shard(targets[key], twin.get_buffer(key))
    for _, module in members:
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))


def _fill_unit(
    targets: Mapping[str, Portion],
    twin: PreTrainedModel,
    members: list[tuple[str, nn.Module]],
    device: torch.device,
    seed: int,
) -> None:
    """Initialise one unit. This is a separate function, so that the unit's storage is freed
    before the next is made."""
    full = _materialise(members, device)
    with _own_random_state(device):
        _run_initialisers(twin, members, seed)
    for key in targets.keys() & full.keys():
        targets[key].fill(full[key].detach())
    for _, module in members:
        module.to("meta")
    full.clear()
    _give_memory_back()


def _give_memory_back() -> None:
    """Return freed blocks to the system.

    glibc keeps freed blocks that lie below others in its heap, unit after unit. Other C libraries
    have no such call, and no such heap.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by each of their names: what weight files hold."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in model.state_dict() if name in tensors}


@dataclass(frozen=True, slots=True)
class Portion:
    """What this rank keeps of one tensor of the model."""

    tensor: Tensor
    """As the model has it: sharded by FSDP2, or not."""

    cut: Cut | None = None
    """What another axis of the mesh has left of it before."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor. Of packed rows it is that of the rows."""
        return tuple(self.tensor.shape) if self.cut is None else self.cut.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.tensor.dtype

    @property
    def packing(self) -> Packing | None:
        """The format of packed rows; None where the tensor is floats."""
        return packing_of(self.tensor)

    @property
    def floats_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, as files have it."""
        # A row of bytes belongs together, so no axis cuts it.
        return self.shape if self.packing is None else shape_of_floats(self.shape, self.packing)

    @property
    def local(self) -> Tensor:
        """The memory of what is kept, to be written to."""
        return local_part(self.tensor)

    @property
    def places(self) -> list[tuple[Box, Box]]:
        """Each box of the whole tensor that is kept, and the box of `local` that holds it. Those
        of packed rows are boxes of the floats."""
        box = local_box(self.tensor)
        if self.cut is None:
            return [(box, whole_box(box.sizes))]
        return list(replace(self.cut, shape=self.floats_shape).places(box))

    def put(self, own: Box, values: Tensor) -> None:
        """Copy floats to one of the boxes of what is kept, or rows that are packed already."""
        packing = self.packing
        if packing is None:
            self.local[own.slices].copy_(values)
            return
        rows = self.local[in_rows(own, packing).slices]
        if values.dtype == packing.dtype:
            rows.copy_(values)
        else:
            pack_into(rows, as_rows(values, packing))

    def fill(self, full: Tensor) -> None:
        """Copy this rank's part of the whole tensor."""
        for whole, own in self.places:
            self.put(own, full[whole.slices])


def portions_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Portion]:
    """What this rank keeps of these tensors of the model, by their names."""
    cuts = cuts_of(model)
    return {name: Portion(tensor, cuts.get(name)) for name, tensor in tensors.items()}


def copy_shard(target: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full` into `target`, which may be sharded and is not cut."""
    Portion(target).fill(full)


def local_part(param: Tensor) -> Tensor:
    """What this rank keeps of `param`, to be written to."""
    param = param.detach()
    return param.to_local() if isinstance(param, DTensor) else param


def local_box(param: Tensor) -> Box:
    """Which part of `param` this rank keeps, as files have it: of a packed parameter, the floats
    that its rows are made of."""
    box = shard_box(param) if isinstance(param, DTensor) else whole_box(param.shape)
    packing = packing_of(param)
    if packing is None:
        return box
    return Box(turned(box.offsets, packing), shape_of_floats(box.sizes, packing))


def shard_box(param: DTensor) -> Box:
    """The box of a sharded parameter that this rank keeps: each sharding axis cuts, as
    torch.chunk does, what the axis before it has left."""
    for placement in param.placements:
        # Exactly these: FSDP2 over tensor parallel gives a `_StridedShard`, which some releases of
        # torch derive from Shard and others do not, and whose parts lie elsewhere.
        if type(placement) not in (Shard, Replicate):
            raise NotImplementedError(
                f"shard_box does not know where the parts of {placement!r} lie: it knows Shard and "
                f"Replicate only (a tensor of shape {list(param.shape)}, {param.placements})"
            )
    offsets, sizes = [0] * param.dim(), list(param.shape)
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard):
            dim, mesh = placement.dim, param.device_mesh
            length = -(-sizes[dim] // mesh.size(axis))
            start = min(length * mesh.get_local_rank(axis), sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(length, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def _unit_members(twin: PreTrainedModel, units: UnitMap) -> Iterator[list[tuple[str, nn.Module]]]:
    """The named modules of each unit, then every other module that holds tensors itself."""
    seen: set[int] = set()
    for unit in units.units:
        inside = {id(m) for name in unit.modules for m in twin.get_submodule(name).modules()}
        seen |= inside
        # This is the model's own order, so that of two tied modules the same one always comes last.
        yield [(name, module) for name, module in twin.named_modules() if id(module) in inside]
    for name, module in twin.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and id(module) not in seen:
            yield [(name, module)]


def _materialise(
    members: Iterable[tuple[str, nn.Module]], device: torch.device
) -> dict[str, Tensor]:
    """Give the tensors of whole modules real storage, by full name.

    `to_empty` would break ties between members, so shared parameters get one storage.
    """
    made: dict[int, nn.Parameter] = {}
    full: dict[str, Tensor] = {}
    for prefix, module in members:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(torch.zeros_like(param, device=device))
            setattr(module, name, made[id(param)])
            full[_join(prefix, name)] = made[id(param)]
        full |= dict(_real_buffers(prefix, module, device))
    return full


def _real_buffers(
    prefix: str, module: nn.Module, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The same for a module's own buffers."""
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, torch.zeros_like(buffer, device=device))
        yield _join(prefix, name), getattr(module, name)


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        yield


def _run_initialisers(
    twin: PreTrainedModel, members: list[tuple[str, nn.Module]], seed: int
) -> None:
    """Initialise children before parents, as transformers does, each by the model that owns it.

    Every module is seeded by its name, so the division into units changes nothing.
    """
    owners = [(name, m) for name, m in twin.named_modules() if isinstance(m, PreTrainedModel)]
    for name, module in reversed(members):
        owner = [model for path, model in owners if not path or f"{name}.".startswith(f"{path}.")]
        seed_generators(f"{seed}/{name}")
        initialise_module(owner[-1], module)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
