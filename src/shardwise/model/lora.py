"""Low-rank adapters in linear layers: y = x W^T + scale (x A^T) B^T.

A layer stays the same module with two more parameters, and gets a subclass with another forward. So
the names of all other parameters stay as they are. A and B are fp32 and trained. Everything else is
frozen, in the dtype that the model computes in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config.schema import AdapterConfig
from shardwise.facts.adapter import AdapterSpec
from shardwise.model.adapter_targets import find_targets
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.weights import copy_shard


class Lora:
    """What an adapted layer has besides its own class. It comes first in the order of classes."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own result and that of the adapter."""
        y: Tensor = super().forward(x)  # type: ignore[misc]
        kept = F.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        # The narrow result is scaled, not the wide one.
        return y + F.linear(F.linear(kept, self.lora_A) * self.lora_scale, self.lora_B)


@cache
def _adapted(cls: type[nn.Module]) -> type[nn.Module]:
    """One class for all layers of a class, so that blocks share one compiled graph."""
    return type(f"Lora{cls.__name__}", (Lora, cls), {})


def apply_lora(model: nn.Module, config: AdapterConfig, dtype: torch.dtype) -> None:
    """Freeze the model in `dtype`, and give its targets adapters on the same device."""
    layers = find_targets(model, config).layers
    freeze(model, dtype)
    for layer in layers.values():
        new = {"device": layer.weight.device, "dtype": torch.float32}
        layer.register_parameter("lora_A", _empty(config.rank, layer.in_features, new))
        layer.register_parameter("lora_B", _empty(layer.out_features, config.rank, new))
        adapted: Any = layer
        adapted.lora_scale = scale_of(config)
        adapted.lora_dropout = config.dropout
        kind: Any = type(layer)
        adapted.__class__ = _adapted(kind)


def scale_of(config: AdapterConfig) -> float:
    """What the product of A and B is multiplied by."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Take gradients from all parameters and cast them; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in made:
                wanted = dtype if param.is_floating_point() else param.dtype
                made[id(param)] = nn.Parameter(param.detach().to(wanted), requires_grad=False)
            setattr(module, name, made[id(param)])


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Lora)}


def adapter_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters, by name."""
    return {
        f"{name}.{part}": getattr(layer, part)
        for name, layer in adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """First values: A as a linear layer of its shape, B zero, so that training begins with the
    model itself. Each A is seeded by its name, so they are the same on every mesh."""
    for name, layer in adapted_layers(model).items():
        a, b = layer.lora_A, layer.lora_B
        digest = hashlib.sha256(f"{seed}/{name}.lora_A".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(a.shape[1])
        copy_shard(a, torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        copy_shard(b, torch.zeros(b.shape))


def count_adapters(model: nn.Module, config: AdapterConfig) -> AdapterSpec:
    """The sizes of the adapters that a model without weights would get."""
    targets = find_targets(model, config)
    units = [next(iter_modules(model, unit)) for unit in find_units(model).blocks]
    inside = [{id(module) for module in unit.modules()} for unit in units]
    layers = targets.layers.values()
    return AdapterSpec(
        rank=config.rank,
        num_layers=len(targets.layers),
        num_params=config.rank * _channels(layers),
        largest_unit=max(
            config.rank * _channels(layer for layer in layers if id(layer) in block)
            for block in inside
        ),
        channels=_channels(layers),
        left=targets.left,
    )


def _channels(layers: Iterable[nn.Linear]) -> int:
    return sum(layer.in_features + layer.out_features for layer in layers)


def _empty(rows: int, columns: int, new: dict[str, Any]) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, **new))
