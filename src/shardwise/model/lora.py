"""Low-rank adapters in linear layers: y = x W^T + scale (x A^T) B^T.

A layer stays the same module with two more parameters, and gets a subclass with another forward. So
the names of all other parameters stay as they are. A and B are fp32 and trained, and so are modules
that are trained whole. Everything else is frozen, in the dtype that the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.config.schema import AdapterConfig
from shardwise.facts.adapter_sizes import AdapterSpec
from shardwise.kernels.packed_rows import floats_of
from shardwise.model.adapter_targets import find_targets
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.expert_lora import ExpertLora, adapt_experts, adapted_stacks
from shardwise.model.head import embedding_of, head_of
from shardwise.model.packed import is_packed
from shardwise.model.quantised import Packed, count_packed
from shardwise.model.seeds import seed_of
from shardwise.model.weights import local_part, portions_of, tied_names


class Lora:
    """What an adapted layer has besides its own class. It comes first in the order of classes."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_is_off: bool = False
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own result and that of the adapter."""
        y: Tensor = super().forward(x)  # type: ignore[misc]
        if self.lora_is_off:
            return y
        kept = F.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        # The narrow result is scaled, not the wide one.
        return y + F.linear(F.linear(kept, self.lora_A) * self.lora_scale, self.lora_B)


class Dora(Lora):
    """The same with a trained length for each row of the sum of weight and adapter."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_magnitude: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """No gradient goes through the lengths that the rows have now, as the method has it."""
        if self.lora_is_off:
            return super().forward(x)
        kept = F.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        low = F.linear(F.linear(kept, self.lora_A) * self.lora_scale, self.lora_B)
        with torch.no_grad():
            weight = _floats(self.weight)
            now = summed(weight, self.lora_A, self.lora_B, self.lora_scale).norm(dim=-1)
        share = (self.lora_magnitude / now).to(x.dtype)
        y = share * (_product(self, x) + low)
        return y if self.bias is None else y + self.bias


def _floats(weight: Tensor) -> Tensor:
    return floats_of(weight, torch.float32) if is_packed(weight) else weight


def _product(layer: Any, x: Tensor) -> Tensor:
    """What a layer computes without its bias."""
    y: Tensor = layer.multiply(x, None) if isinstance(layer, Packed) else F.linear(x, layer.weight)
    return y


def summed(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A weight and the product of its adapter, in fp32."""
    return weight.float() + scale * (b.float() @ a.float())


@cache
def _adapted(cls: type[nn.Module], kind: type[Lora]) -> type[nn.Module]:
    """One class for all layers of a class, so that blocks share one compiled graph."""
    return type(f"{kind.__name__}{cls.__name__}", (kind, cls), {})


def apply_lora(model: nn.Module, config: AdapterConfig, dtype: torch.dtype) -> None:
    """Freeze the model in `dtype`, and give its targets adapters on the same device."""
    targets = find_targets(model, config)
    freeze(model, dtype, but={id(p) for m in targets.whole.values() for p in m.parameters()})
    for experts, stack in targets.stacks.values():
        adapt_experts(experts, stack, targets.forms[experts], config, scale_of(config))
    for layer in targets.layers.values():
        new = {"device": layer.weight.device, "dtype": torch.float32}
        layer.register_parameter("lora_A", _empty((config.rank, layer.in_features), new))
        layer.register_parameter("lora_B", _empty((layer.out_features, config.rank), new))
        adapted: Any = layer
        adapted.lora_scale = scale_of(config)
        adapted.lora_dropout = config.dropout
        if config.dora:
            layer.register_parameter("lora_magnitude", _empty((layer.out_features,), new))
        own: Any = type(layer)
        adapted.__class__ = _adapted(own, Dora if config.dora else Lora)


def scale_of(config: AdapterConfig) -> float:
    """What the product of A and B is multiplied by."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def freeze(model: nn.Module, dtype: torch.dtype, but: Collection[int] = ()) -> None:
    """Take gradients from all parameters and cast them, but those with these identities; tied ones
    stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in but:
                continue
            if id(param) not in made:
                wanted = dtype if param.is_floating_point() else param.dtype
                made[id(param)] = nn.Parameter(param.detach().to(wanted), requires_grad=False)
            setattr(module, name, made[id(param)])


@dataclass(frozen=True, slots=True)
class Adapter:
    """A and B of one weight."""

    a: str
    b: str
    """The names of the two parameters."""

    scale: float
    is_stack: bool
    """Whether there is an A and a B for each expert."""

    magnitude: str | None = None
    """The name of the lengths of rows, where they are trained."""

    is_transposed: bool = False
    """Whether the weight lies as (in, out)."""

    @property
    def names(self) -> list[str]:
        """The names of all parameters of the adapter."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that have adapters, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Lora | ExpertLora)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it would without adapters."""
    adapted = adapted_modules(model).values()
    for module in adapted:
        module.lora_is_off = True
    try:
        yield
    finally:
        for module in adapted:
            module.lora_is_off = False


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """All adapters, by the name of the weight that they belong to."""
    found: dict[str, Adapter] = {}
    for name, module in model.named_modules():
        if isinstance(module, Lora):
            a, b = f"{name}.lora_A", f"{name}.lora_B"
            length = f"{name}.lora_magnitude" if isinstance(module, Dora) else None
            found[f"{name}.weight"] = Adapter(a, b, module.lora_scale, False, length)
        elif isinstance(module, ExpertLora):
            for stack, (first, second) in adapted_stacks(module).items():
                a, b = f"{name}.{first}", f"{name}.{second}"
                found[f"{name}.{stack}"] = Adapter(
                    *(a, b, module.lora_scale),
                    is_stack=True,
                    is_transposed=module.expert_form.is_transposed,
                )
    return found


def adapter_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters, by name."""
    adapters = adapters_of(model).values()
    return {name: model.get_parameter(name) for each in adapters for name in each.names}


def whole_params(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter that is trained whole, by its first name."""
    added = adapter_params(model).keys()
    return {
        names[0]: list(names)
        for names in tied_names(model)
        if names[0] not in added and model.get_parameter(names[0]).requires_grad
    }


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """First values: A as a linear layer of its shape, B zero, so that training begins with the
    model itself. Each A is seeded by its name, so they are the same on every mesh."""
    kept = portions_of(model, dict(model.named_parameters()))
    for weight, each in adapters_of(model).items():
        a, b = kept[each.a], kept[each.b]
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/{each.a}"))
        bound = 1 / math.sqrt(a.shape[-1])
        a.fill(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        b.fill(torch.zeros(b.shape))
        if each.magnitude is not None:
            _take_lengths(model.get_parameter(each.magnitude), model.get_parameter(weight))


def _take_lengths(lengths: Tensor, weight: Tensor) -> None:
    """Fill `lengths` with those of the rows of a weight, which may be sharded in another way."""
    rows = _packed_lengths(weight) if is_packed(weight) else weight.detach().float().norm(dim=-1)
    if isinstance(rows, DTensor) and isinstance(lengths, DTensor):
        rows = rows.redistribute(lengths.device_mesh, lengths.placements).to_local()
    local_part(lengths).copy_(rows)


def _packed_lengths(weight: Tensor) -> Tensor:
    """The lengths of the rows of packed weights, sharded as the rows are."""
    own = floats_of(local_part(weight), torch.float32).norm(dim=-1)
    if not isinstance(weight, DTensor):
        return own
    sizes: dict[str, Any] = {"shape": weight.shape[:1], "stride": (1,)}
    placed = (weight.device_mesh, weight.placements)
    return DTensor.from_local(own, *placed, run_check=False, **sizes)


def count_adapters(
    model: nn.Module,
    config: AdapterConfig,
    experts_per_token: int = 1,
    unpacked: Collection[str] = (),
) -> AdapterSpec:
    """The sizes of the adapters that a model without weights would get. `unpacked` are modules that
    its files do not have in the format of `config.base`."""
    targets = find_targets(model, config)
    layers: dict[nn.Module, int] = {
        layer: layer.in_features + layer.out_features for layer in targets.layers.values()
    }
    stacks: dict[nn.Module, int] = {}
    for module, stack in targets.stacks.values():
        count, width, inner = getattr(module, stack).shape
        stacks[module] = stacks.get(module, 0) + count * (width + inner)
    # A token goes through some of the experts.
    shares = (experts_per_token * size / _num_experts(module) for module, size in stacks.items())
    channels = sum(layers.values()) + round(sum(shares))
    sizes: dict[nn.Module, int] = {**layers, **stacks}
    whole = {id(param): param for m in targets.whole.values() for param in m.parameters()}
    units = [next(iter_modules(model, unit)) for unit in find_units(model).blocks]
    lengths: dict[nn.Module, int] = {
        layer: layer.out_features * config.dora for layer in targets.layers.values()
    }
    largest = max(
        sum(config.rank * sizes.get(m, 0) + lengths.get(m, 0) for m in unit.modules())
        + sum(param.numel() for param in unit.parameters() if id(param) in whole)
        for unit in units
    )
    return AdapterSpec(
        rank=config.rank,
        num_layers=len(targets.layers) + len(targets.stacks),
        num_params=config.rank * sum(sizes.values())
        + sum(lengths.values())
        + sum(param.numel() for param in whole.values()),
        largest_unit=largest,
        channels=channels,
        left=targets.left,
        whole=tuple(targets.whole),
        whole_params=sum(param.numel() for param in whole.values()),
        table=_size_of(embedding_of(model), whole),
        head=_size_of(head_of(model), whole),
        **count_packed(model, config.base, unpacked),
    )


def _size_of(module: Any, whole: Mapping[int, nn.Parameter]) -> int:
    """The parameters of a table, where it is trained whole."""
    return module.weight.numel() if id(getattr(module, "weight", None)) in whole else 0


def _num_experts(module: nn.Module) -> int:
    return max(len(param) for param in module.parameters(recurse=False))


def _empty(shape: tuple[int, ...], new: dict[str, Any]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **new))
