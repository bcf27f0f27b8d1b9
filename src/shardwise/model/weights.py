"""First weights, a unit at a time: no rank ever holds more than its shards and one unit.

Random weights come from the family's own initialiser, run on a full copy of one unit, each module
seeded by its own name, so every world size, strategy and unit size starts from the same model.
Pretrained weights are read as slices: each rank reads the rows that it keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from shardwise.errors import UserError
from shardwise.model.blocks import UnitMap

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


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
    """Read every parameter of the sharded `model` from safetensors; returns the bytes read."""
    files = _files_by_key(directory)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    aliases = _aliases(model)
    plan: dict[Path, list[tuple[str, Tensor]]] = {}
    missing = []
    for name, param in model.named_parameters():
        key = next((k for k in _spellings(name, prefix, aliases) if k in files), None)
        if key is None:
            missing.append(name)
        else:
            plan.setdefault(files[key], []).append((key, param))
    if missing:
        raise UserError(
            f"{len(missing)} parameters of the model are not in {directory}",
            why=f"first of them: {', '.join(missing[:3])}; the files hold: "
            f"{', '.join(sorted(files)[:3])}",
            fix="check that model.name and the weights are of one family, or set "
            "model.weights=random",
        )
    return sum(_read_rows(path, items) for path, items in plan.items())


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


def _files_by_key(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_NAME
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: directory / name for key, name in names.items()}
    single = directory / SINGLE_NAME
    if not single.exists():
        raise UserError(
            f"no safetensors weights in {directory}",
            why=f"neither {INDEX_NAME} nor {SINGLE_NAME} is there",
            fix="save the model with save_pretrained, or set model.weights=random",
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Other names of tied parameters: a file may hold either."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {group[0]: group[1:] for group in names.values()}


def _spellings(name: str, prefix: str, aliases: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The names under which a checkpoint may hold a parameter."""
    for spelling in (name, *aliases.get(name, ())):
        yield spelling
        yield spelling.removeprefix(prefix)


def _read_rows(path: Path, items: Iterable[tuple[str, Tensor]]) -> int:
    """Each tensor opens the file anew: a closed mapping gives its pages back, and peak memory
    stays at the shards plus one tensor's rows."""
    num_bytes = 0
    for key, param in items:
        with safe_open(path, framework="pt") as file:
            stored = file.get_slice(key)
            if list(stored.get_shape()) != list(param.shape):
                raise UserError(
                    f"{path.name}: {key} has shape {stored.get_shape()}, the model needs "
                    f"{list(param.shape)}",
                    fix="check model.overrides against the checkpoint's config.json",
                )
            begin, end = local_rows(param) if isinstance(param, DTensor) else (0, len(param))
            rows = stored[begin:end]
            with torch.no_grad():
                local = param.to_local() if isinstance(param, DTensor) else param
                local.copy_(rows)
            num_bytes += rows.numel() * rows.element_size()
    return num_bytes


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
