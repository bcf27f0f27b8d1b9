"""First weights, a unit at a time: no rank ever holds more than its shards and one unit.

Random weights come from the family's own initialiser, run on a full copy of one unit, each module
seeded by its own name, so every world size, strategy and unit size starts from the same model.
Pretrained weights are read as slices: each rank reads the rows that it keeps.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
)

from shardwise.errors import UserError
from shardwise.model.blocks import UnitMap

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_NAME = "pytorch_model.bin"


def allocate_shards(model: nn.Module, device: torch.device, *, buffers_on: torch.device) -> None:
    """Give the meta model real but uninitialised storage: each rank's own shards only.

    With CPU offload the shards live on the host, while buffers are used where compute happens.
    """
    model.to_empty(device=device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(buffers_on))


def initialise_weights(
    model: nn.Module, twin: PreTrainedModel, units: UnitMap, *, seed: int, device: torch.device
) -> None:
    """Fill the sharded `model` from its unsharded meta `twin`, one unit of it at a time."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for members in _unit_members(twin, units):
        _fill_unit(targets, twin, members, device, seed)


def initialise_buffers(model: nn.Module, twin: PreTrainedModel, device: torch.device) -> None:
    """Rotary frequencies, masks and the like, which no checkpoint holds. Parameters stay."""
    targets = dict(model.named_buffers())
    for name, module in twin.named_modules():
        if any(True for _ in module.buffers(recurse=False)):
            _fill_unit(targets, twin, [(name, module)], device, seed=0)


def _fill_unit(
    targets: Mapping[str, Tensor],
    twin: PreTrainedModel,
    members: list[tuple[str, nn.Module]],
    device: torch.device,
    seed: int,
) -> None:
    """A function of its own, so that one unit's storage is gone before the next is made."""
    full = _materialise(members, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        _run_initialisers(twin, members, seed)
    for key, value in full.items():
        if key in targets:
            copy_rows(targets[key], value.detach())
    for _, module in members:
        module.to("meta")


def load_pretrained(model: nn.Module, directory: Path) -> int:
    """Read every parameter of the sharded `model` from `directory`; returns the bytes read."""
    files = open_weights(directory)
    plain, fusions = _match_keys(model, files)
    fused = {name: fusion for fusion in fusions for name in fusion.targets}
    aliases = _aliases(model)
    missing: list[str] = []
    wanted: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        source = next((n for n in (name, *aliases[name]) if n in plain or n in fused), None)
        if source is None:
            missing.append(name)
        else:
            wanted[source] = param
    if missing:
        raise _not_there(missing, directory, files)
    # A fusion may fill several parameters, so the loop is over fusions.
    return sum(
        _read_rows(files, plain[source], param)
        for source, param in wanted.items()
        if source in plain
    ) + sum(_read_fused(files, fusion, wanted) for fusion in fusions)


def copy_rows(target: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of `full` into `target`, which may be sharded on dim 0."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(full[slice(*local_rows(target))])
        else:
            target.copy_(full)


def local_rows(param: DTensor) -> tuple[int, int]:
    """First and last-plus-one row of `param` that this rank keeps."""
    start, size = 0, param.shape[0] if param.dim() else 1
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise NotImplementedError(f"sharded on dim {placement.dim}; only dim 0 is read")
            rows = -(-size // param.device_mesh.size(axis))
            offset = min(rows * param.device_mesh.get_local_rank(axis), size)
            start, size = start + offset, min(rows, size - offset)
    return start, start + size


def _unit_members(twin: PreTrainedModel, units: UnitMap) -> Iterator[list[tuple[str, nn.Module]]]:
    """The named modules of each unit, then every other module that holds tensors of its own."""
    seen: set[int] = set()
    for unit in units.units:
        inside = {id(m) for name in unit.modules for m in twin.get_submodule(name).modules()}
        seen |= inside
        # The model's own order: of two tied modules the same one always comes last.
        yield [(name, module) for name, module in twin.named_modules() if id(module) in inside]
    for name, module in twin.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and id(module) not in seen:
            yield [(name, module)]


def _materialise(
    members: Iterable[tuple[str, nn.Module]], device: torch.device
) -> dict[str, Tensor]:
    """Real storage for the tensors of whole modules, by full name.

    `to_empty` would break ties between members, so shared parameters are given one storage.
    """
    made: dict[int, nn.Parameter] = {}
    full: dict[str, Tensor] = {}
    for prefix, module in members:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(torch.zeros_like(param, device=device))
            setattr(module, name, made[id(param)])
            full[_join(prefix, name)] = made[id(param)]
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))
            full[_join(prefix, name)] = getattr(module, name)
    return full


def _run_initialisers(
    twin: PreTrainedModel, members: list[tuple[str, nn.Module]], seed: int
) -> None:
    """Children before parents, as transformers does it, and each by the model that owns it.

    Every module starts from a seed of its own name, so that how units are cut changes nothing.
    """
    owners = [(name, m) for name, m in twin.named_modules() if isinstance(m, PreTrainedModel)]
    for name, module in reversed(members):
        owner = [model for path, model in owners if not path or f"{name}.".startswith(f"{path}.")]
        torch.manual_seed(_seed_of(f"{seed}/{name}"))
        owner[-1]._init_weights(module)


def _seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


class StoredWeights(Protocol):
    """Tensors on disk by name; only the rows that are asked for are read."""

    def keys(self) -> Iterable[str]:
        """All names."""

    def shape(self, key: str) -> list[int]:
        """Of the whole tensor."""

    def read(self, key: str, rows: slice) -> Tensor:
        """These rows of a tensor; of a scalar, all of it."""


class _Safetensors:
    """Each read opens the file anew: a closed mapping gives its pages back, and peak memory
    stays at the shards plus one tensor's rows."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def keys(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, key: str) -> list[int]:
        with safe_open(self._files[key], framework="pt") as file:
            return list(file.get_slice(key).get_shape())

    def read(self, key: str, rows: slice) -> Tensor:
        with safe_open(self._files[key], framework="pt") as file:
            stored = file.get_slice(key)
            found: Tensor = stored[rows] if stored.get_shape() else file.get_tensor(key)
            return found


class _TorchFiles:
    """Files of `torch.save`, mapped: the system reads the rows that are copied, no others."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors = {key: value for path in paths for key, value in _map_torch(path).items()}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, key: str) -> list[int]:
        return list(self._tensors[key].shape)

    def read(self, key: str, rows: slice) -> Tensor:
        tensor = self._tensors[key]
        return tensor[rows] if tensor.dim() else tensor


def open_weights(directory: Path) -> StoredWeights:
    """What `save_pretrained` left there: safetensors, or else the older `pytorch_model.bin`."""
    if (index := directory / INDEX_NAME).exists():
        return _Safetensors(_weight_map(index))
    if (single := directory / SINGLE_NAME).exists():
        with safe_open(single, framework="pt") as file:
            return _Safetensors(dict.fromkeys(file.keys(), single))
    if (index := directory / TORCH_INDEX_NAME).exists():
        return _TorchFiles(sorted(set(_weight_map(index).values())))
    if (single := directory / TORCH_NAME).exists():
        return _TorchFiles([single])
    raise UserError(
        f"no safetensors weights in {directory}",
        why=f"none of {INDEX_NAME}, {SINGLE_NAME}, {TORCH_INDEX_NAME} and {TORCH_NAME} is there",
        fix="save the model with save_pretrained, or set model.weights=random",
    )


def _weight_map(index: Path) -> dict[str, Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return {key: index.parent / name for key, name in names.items()}


def _map_torch(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle may name tensors and plain containers, and runs nothing.
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot read {path}",
            why=str(error).strip().splitlines()[0],
            fix="load it where you trust it and save it anew with save_pretrained (safetensors)",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(
            f"{path} is not a state dict",
            why="it must hold tensors by name and nothing else",
            fix="save model.state_dict() alone, or use save_pretrained",
        )
    return state


@dataclass(frozen=True, slots=True)
class _Fusion:
    """Stored tensors that only together are parameters, such as the experts of a layer."""

    converter: WeightConverter
    target: str
    keys: dict[str, list[str]] = field(default_factory=dict)
    """The stored names, in order, by the converter's pattern for them."""

    @property
    def targets(self) -> list[str]:
        """All parameters that it fills; `target` is the first."""
        first, *_ = patterns = self.converter.target_patterns
        return [self.target.replace(first, pattern) for pattern in patterns]

    @property
    def is_rowwise(self) -> bool:
        """Whether row i is made of the i-th tensor of each list, so that a rank may read its own
        rows alone."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)
        )

    def convert(self, read: Callable[[str], Tensor], which: slice) -> dict[str, Tensor]:
        """The parameters by name, made of `which` tensors of each list."""
        converter: Any = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys[which]:
                # Held by the converter alone, which lets go of each part as it merges them.
                converter.add_tensor(self.target, key, pattern, read(key))
        return dict(converter.convert(self.target))


def _match_keys(
    model: nn.Module, files: StoredWeights
) -> tuple[dict[str, str], Collection[_Fusion]]:
    """What fills each parameter: one stored tensor, or several through transformers' converter.

    Families that transformers 5 holds fused (experts, for one) lie unfused in most files.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    renamings, converters = _conversions(model)

    def fit(name: str) -> str:
        return next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in names), "")

    plain: dict[str, str] = {}
    fusions: dict[str, _Fusion] = {}
    for key in sorted(files.keys(), key=dot_natural_key):
        renamed = key
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None and (name := fit(target)):
                fusion = fusions.setdefault(name, _Fusion(converter, name))
                fusion.keys.setdefault(pattern, []).append(key)
                break
        else:
            if name := fit(renamed) or fit(key):
                plain.setdefault(name, key)
    return plain, fusions.values()


def _conversions(model: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """How transformers reads this family's files.

    Asked of a twin: FSDP2 gives modules a class of its own, which passes for custom code there.
    """
    family = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    if not issubclass(family, PreTrainedModel):
        return [], []
    config: Any = model.config
    with torch.device("meta"):
        found = get_model_conversion_mapping(family(config))
    return (
        [entry for entry in found if isinstance(entry, WeightRenaming)],
        [entry for entry in found if isinstance(entry, WeightConverter)],
    )


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Other names of tied parameters: a file may hold either."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {group[0]: group[1:] for group in names.values()}


def _read_rows(files: StoredWeights, key: str, param: Tensor) -> int:
    """Fill `param` from one stored tensor; returns the bytes read."""
    _validate_shape(key, files.shape(key), param)
    rows = files.read(key, _rows_of(param))
    _local(param).copy_(rows)
    return rows.nbytes


def _read_fused(files: StoredWeights, fusion: _Fusion, wanted: Mapping[str, Tensor]) -> int:
    """Fill what a fusion makes, from this rank's part of the files where that is enough."""
    params = {name: wanted[name] for name in fusion.targets if name in wanted}
    if not params:
        return 0
    if fusion.is_rowwise:
        return _read_fused_rows(files, fusion, params[fusion.target])
    made = fusion.convert(lambda key: files.read(key, slice(None)), slice(None))
    for name, param in params.items():
        _validate_shape(name, list(made[name].shape), param)
        copy_rows(param, made[name])
    return sum(value.nbytes for value in made.values())


def _read_fused_rows(files: StoredWeights, fusion: _Fusion, param: Tensor) -> int:
    for keys in fusion.keys.values():
        _validate_shape(fusion.target, [len(keys), *param.shape[1:]], param)
    local = _local(param)
    if not local.numel():
        return 0
    made = fusion.convert(lambda key: files.read(key, slice(None)), _rows_of(param))
    rows = made[fusion.target]
    _validate_shape(fusion.target, [param.shape[0], *rows.shape[1:]], param)
    local.copy_(rows)
    return rows.nbytes


def _rows_of(param: Tensor) -> slice:
    return slice(*local_rows(param)) if isinstance(param, DTensor) else slice(None)


def _local(param: Tensor) -> Tensor:
    param = param.detach()
    return param.to_local() if isinstance(param, DTensor) else param


def _validate_shape(key: str, stored: list[int], param: Tensor) -> None:
    if stored != list(param.shape):
        raise UserError(
            f"{key} has shape {stored} in the files, the model needs {list(param.shape)}",
            fix="check model.overrides against the checkpoint's config.json",
        )


def _not_there(missing: list[str], directory: Path, files: StoredWeights) -> UserError:
    return UserError(
        f"{len(missing)} parameters of the model are not in {directory}",
        why=f"first of them: {', '.join(missing[:3])}; the files hold: "
        f"{', '.join(sorted(files.keys())[:3])}",
        fix="check that model.name and the weights are of one family, or set model.weights=random",
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
