"""Which stored tensors fill which tensors of a model, by the names of both.

Most fill one of the model's by themselves. Some fill parameters only together, and a converter of
transformers makes those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shardwise.internals.private_names import WRAPPERS
from shardwise.internals.weight_conversions import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
)
from shardwise.model.boxes import Box
from shardwise.model.lora import adapter_params
from shardwise.model.stage_part import names_elsewhere, other_names
from shardwise.model.stored import StoredWeights
from shardwise.model.weights import stored_tensors


@dataclass(frozen=True, slots=True)
class Fusion:
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
class Matched:
    """What fills each tensor of a model: one stored tensor, or several through a converter."""

    tensors: dict[str, Tensor]
    """Parameters and persistent buffers, a tied one under each of its names."""

    plain: dict[str, str] = field(default_factory=dict)
    """Stored names by the model's names."""

    fusions: list[Fusion] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Stored tensors that fill nothing, and what the model would call them."""


def match_keys(model: nn.Module, files: StoredWeights) -> Matched:
    """Which stored tensors fill which tensors of the model.

    Families that transformers 5 holds fused (experts, for example) are unfused in most files.
    """
    matched = Matched(own_tensors(model))
    # Files may hold buffers that the model computes itself; nobody reads them.
    computed = {name for name, _ in model.named_buffers()} - matched.tensors.keys()
    elsewhere = names_elsewhere(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    renamings, converters = _conversions(model)

    def fit(name: str, names: Collection[str] = matched.tensors.keys()) -> str:
        return next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in names), "")

    fusions: dict[str, Fusion] = {}
    for key in sorted(files.keys(), key=dot_natural_key):
        renamed = _without_wrappers(key)
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None and (name := fit(target)):
                fusion = fusions.setdefault(name, Fusion(converter, name))
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


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What files of the model hold: everything but adapters."""
    added = adapter_params(model).keys()
    own = {name: each for name, each in stored_tensors(model).items() if name not in added}
    return own | {other: own[name] for other, name in other_names(model).items() if name in own}
