"""Pretrained weights into shards. Each rank reads the part that it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shardwise.errors import UserError
from shardwise.internals.names import WRAPPERS
from shardwise.internals.weight_conversions import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
)
from shardwise.model.boxes import Box, cover_once, whole_box
from shardwise.model.dequantised import open_dequantised
from shardwise.model.leftovers import may_be_missing, validate_leftovers
from shardwise.model.lora import adapter_params
from shardwise.model.new_rows import num_new_rows, read_with_new_rows, table_params
from shardwise.model.packed import is_packed
from shardwise.model.stages import names_elsewhere, other_names
from shardwise.model.stored import StoredWeights
from shardwise.model.weights import Portion, portions_of, stored_tensors

_FETCH_ANEW = "fetch or save the weights anew; some of their files may be missing"


def load_pretrained(model: nn.Module, place: Path, ignore: Sequence[str] = ()) -> int:
    """Read every parameter and persistent buffer of the sharded `model` from `place`.

    Returns the bytes read. A tensor in the files that the model does not have is an error, unless
    the family says that it may stay unread or a pattern of `ignore` matches it. Quantised weights
    are dequantised, and count as what they become.
    """
    files = open_dequantised(place)
    matched = _match_keys(model, files)
    fused = {name for fusion in matched.fusions for name in fusion.targets}
    portions = portions_of(model, matched.tensors)
    wanted: dict[str, Portion] = {}
    missing: list[str] = []
    for first, *others in _tied_names(model):
        found = [name for name in (first, *others) if name in matched.plain or name in fused]
        if not found:
            missing.append(first)
            continue
        wanted[found[0]] = portions[first]
        keys = [matched.plain[name] for name in found if name in matched.plain]
        _validate_equal(files, keys, portions[first])
    _validate_all_there(model, missing, place, files)
    validate_leftovers(matched.left, model, files, place, ignore)
    # A fusion may fill several parameters, so the loop is over fusions.
    tables = table_params(model)
    return sum(
        _read_plain(files, matched.plain[source], kept, may_grow=id(kept.tensor) in tables)
        for source, kept in wanted.items()
        if source in matched.plain
    ) + sum(_read_fused(files, fusion, wanted) for fusion in matched.fusions)


def new_rows(model: nn.Module, place: Path) -> dict[str, int]:
    """The tables that have more rows than the files, and how many."""
    files = open_dequantised(place)
    matched, tables = _match_keys(model, files), table_params(model)
    portions, here = portions_of(model, matched.tensors), other_names(model)
    counts = {
        name: num_new_rows(tuple(files.shape(key)), portions[here.get(name, name)].shape)
        for name, key in matched.plain.items()
        if id(matched.tensors[name]) in tables
    }
    return {name: count for name, count in counts.items() if count}


def stored_parts(model: nn.Module, files: StoredWeights) -> dict[str, tuple[str, Box]]:
    """For each tensor in the files that fills one of the model's, or a part of it, by itself: the
    model's name, and the part."""
    matched = _match_keys(model, files)
    parts = {key: (name, whole_box(files.shape(key))) for name, key in matched.plain.items()}
    for fusion in matched.fusions:
        if fusion.is_stack:
            parts |= {key: (fusion.target, box) for key, box in fusion.stack(files).items()}
    return parts


@dataclass(frozen=True, slots=True)
class _Fusion:
    """Stored tensors that form parameters only together, such as the experts of a layer."""

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
    def is_stack(self) -> bool:
        """Whether it only puts tensors side by side, so that a rank may read parts of them."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and len(rest) == (len(self.converter.source_patterns) > 1)
            and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)
        )

    def stack(self, files: StoredWeights) -> dict[str, Box]:
        """For a stack: each stored tensor, and the box of the parameter that it fills.

        Row i holds the i-th tensor of every list, one after the other in the dim of Concatenate.
        """
        dim = next((op.dim for op in self.converter.operations if isinstance(op, Concatenate)), 1)
        boxes: dict[str, Box] = {}
        behind = 0
        for pattern in self.converter.source_patterns:
            keys = self.keys[pattern]
            shape = files.shape(keys[0])
            columns = [behind if column == dim else 0 for column in range(1, len(shape) + 1)]
            boxes |= {key: Box((row, *columns), (1, *shape)) for row, key in enumerate(keys)}
            behind += shape[dim - 1] if dim <= len(shape) else 0
        return boxes

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parameters by name, made of all tensors."""
        converter: Any = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                # Only the converter holds the parts, and it frees each as it merges them.
                converter.add_tensor(self.target, key, pattern, read(key))
        return dict(converter.convert(self.target))


@dataclass(frozen=True, slots=True)
class _Matched:
    """What fills each tensor of a model: one stored tensor, or several through a converter."""

    tensors: dict[str, Tensor]
    """Parameters and persistent buffers, a tied one under each of its names."""

    plain: dict[str, str] = field(default_factory=dict)
    """Stored names by the model's names."""

    fusions: list[_Fusion] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Stored tensors that fill nothing, and what the model would call them."""


def _match_keys(model: nn.Module, files: StoredWeights) -> _Matched:
    """Which stored tensors fill which tensors of the model.

    Families that transformers 5 holds fused (experts, for example) are unfused in most files.
    """
    matched = _Matched(_own_tensors(model))
    # Files may hold buffers that the model computes itself; nobody reads them.
    computed = {name for name, _ in model.named_buffers()} - matched.tensors.keys()
    elsewhere = names_elsewhere(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    renamings, converters = _conversions(model)

    def fit(name: str, names: Collection[str] = matched.tensors.keys()) -> str:
        return next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in names), "")

    fusions: dict[str, _Fusion] = {}
    for key in sorted(files.keys(), key=dot_natural_key):
        renamed = _without_wrappers(key)
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None and (name := fit(target)):
                fusion = fusions.setdefault(name, _Fusion(converter, name))
                fusion.keys.setdefault(pattern, []).append(key)
                break
            if pattern is not None and fit(target, elsewhere):
                break
        else:
            name = fit(renamed) or fit(_without_wrappers(key))
            if name and name not in matched.plain:
                matched.plain[name] = key
            elif not fit(renamed, computed | elsewhere):
                matched.left[key] = renamed
    matched.fusions.extend(fusions.values())
    return matched


def _without_wrappers(key: str) -> str:
    """A name without what FSDP1, compile, checkpointing or DDP have put into it."""
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    return ".".join(parts).removeprefix("module.")


def _conversions(model: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """How transformers reads this family's files.

    The unsharded twin is asked, because FSDP2 changes the classes of modules, and transformers
    takes the new classes for custom code.
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


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What files of the model hold: everything but adapters."""
    added = adapter_params(model).keys()
    own = {name: each for name, each in stored_tensors(model).items() if name not in added}
    return own | {other: own[name] for other, name in other_names(model).items() if name in own}


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each stored tensor. A file may hold any of several tied names."""
    names: dict[int, list[str]] = {}
    for name, tensor in _own_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _validate_equal(files: StoredWeights, keys: Sequence[str], kept: Portion) -> None:
    """Raise where a file holds two tensors for names that the model ties: it is of another
    model."""
    for key in keys[1:]:
        first = keys[0]
        _validate_shape(key, files.shape(key), files.shape(first))
        stored = whole_box(files.shape(first))
        parts = [box.overlap(stored) for box, _ in kept.places]
        if not all(torch.equal(files.read(first, p), files.read(key, p)) for p in parts):
            raise UserError(
                f"{first} and {key} differ in the files, and the model ties them",
                why="it would train with the first of them in both places",
                fix="set model.overrides.tie_word_embeddings=false if they are embedding and head, "
                "as save_pretrained would have written it",
            )


def _read_plain(files: StoredWeights, key: str, kept: Portion, *, may_grow: bool = False) -> int:
    """Fill `kept` from one stored tensor; returns the bytes read."""
    if may_grow and num_new_rows(tuple(files.shape(key)), kept.shape):
        return read_with_new_rows(files, key, kept)
    _validate_shape(key, files.shape(key), kept.floats_shape)
    num_bytes = 0
    for whole, own in kept.places:
        part = files.read(key, whole)
        _copy(key, part, kept, own)
        num_bytes += part.nbytes
    return num_bytes


def _read_fused(files: StoredWeights, fusion: _Fusion, wanted: Mapping[str, Portion]) -> int:
    """Fill what a fusion makes, from this rank's part of the files where that is enough."""
    portions = {name: wanted[name] for name in fusion.targets if name in wanted}
    if not portions:
        return 0
    absent = [p for p in fusion.converter.source_patterns if p not in fusion.keys]
    if absent:
        raise UserError(
            f"{fusion.target} cannot be made: the files have no tensor like {', '.join(absent)}",
            why=f"they have {', '.join(fusion.keys)}, which is a part of it",
            fix=_FETCH_ANEW,
        )
    if fusion.is_stack:
        return _read_stack(files, fusion, portions[fusion.target])
    made = fusion.convert(lambda key: files.read(key, whole_box(files.shape(key))))
    for name, kept in portions.items():
        _validate_shape(name, made[name].shape, kept.floats_shape)
        kept.fill(made[name])
    return sum(value.nbytes for value in made.values())


def _read_stack(files: StoredWeights, fusion: _Fusion, kept: Portion) -> int:
    """Fill `kept` from the parts of stored tensors that this rank keeps."""
    boxes = fusion.stack(files)
    _validate_stack(fusion.target, boxes.values(), kept.floats_shape)
    num_bytes = 0
    for (key, box), (whole, own) in product(boxes.items(), kept.places):
        common = whole.overlap(box)
        if common.num_elements:
            _validate_shape(key, files.shape(key), box.sizes[1:])
            inside = common.seen_from(box)
            # Stored tensors have no dim for the row.
            part = files.read(key, Box(inside.offsets[1:], inside.sizes[1:]))
            _copy(key, part[None], kept, common.seen_from(whole).moved_by(own.offsets))
            num_bytes += part.nbytes
    return num_bytes


def _copy(key: str, part: Tensor, kept: Portion, own: Box) -> None:
    """Copy what was read to a box of what this rank keeps, unless it is whole numbers that stand
    for other values."""
    wants_floats = kept.tensor.is_floating_point() or is_packed(kept.tensor)
    if wants_floats and not part.is_floating_point():
        raise UserError(
            f"{key} is stored as {str(part.dtype).removeprefix('torch.')}, the model needs floats",
            why="such weights are quantised, and config.json does not say how",
            fix="name a copy whose weights are bf16 or fp32: model.weights_from=DIR",
        )
    kept.put(own, part)


def _validate_shape(key: str, stored: Sequence[int], wanted: Sequence[int]) -> None:
    if list(stored) != list(wanted):
        raise UserError(
            f"{key} has shape {list(stored)} in the files, the model needs {list(wanted)}",
            fix="leave model.overrides out, or write model.weights=random",
        )


def _validate_stack(name: str, boxes: Collection[Box], shape: Sequence[int]) -> None:
    """Raise unless the files fill all of a parameter, and nothing twice."""
    ends = zip(*([part.stop for part in box.slices] for box in boxes), strict=False)
    _validate_shape(name, [max(stops) for stops in ends], shape)
    whole = tuple(shape)
    if not all(box.lies_in(whole) for box in boxes) or not cover_once(whole, boxes):
        raise UserError(
            f"{name} cannot be made: the files have only a part of it",
            why=f"they have {len(boxes)} tensors for it, which leave gaps",
            fix=_FETCH_ANEW,
        )


def _validate_all_there(
    model: nn.Module, missing: list[str], place: Path, files: StoredWeights
) -> None:
    """Raise where a tensor was not filled, unless it is a buffer that the family's files need
    not have. Such a buffer keeps its first value."""
    buffers = {name for name, _ in model.named_buffers()}
    optional = may_be_missing(model, buffers)
    absent = [name for name in missing if name not in optional]
    if absent:
        raise UserError(
            f"{len(absent)} tensors of the model are not in {place}",
            why=f"first of them: {', '.join(absent[:3])}; the files hold: "
            f"{', '.join(sorted(files.keys())[:3])}",
            fix="name a config.json and weights of one family: model.name=DIR, or write "
            "model.weights=random",
        )
