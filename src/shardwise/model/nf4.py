"""A frozen model whose linear layers and experts are in NF4 (QLoRA).

FSDP2 shards the bytes of a weight by rows, gathers them as they are, and casts floats alone. The
floats exist inside the layer's forward and backward only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.facts.nf4 import BLOCK, row_bytes
from shardwise.kernels.nf4 import Nf4Product
from shardwise.model.expert_forms import STACKS, SWIGLU, find_form
from shardwise.model.expert_lora import take_over
from shardwise.model.head import head_of
from shardwise.model.packed import pack_weight
from shardwise.model.routers import ROUTER_NAMES


class Nf4:
    """What a layer in NF4 has besides its own class. It comes first in the order of classes."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, from floats that are made here and freed here."""
        if not x.is_floating_point():
            # Code that casts to the dtype of a layer's weight would cast to bytes.
            raise _refuse_cast()
        y: Tensor = Nf4Product.apply(x, self.weight, self.bias)
        return y


@cache
def _quantised(cls: Any) -> type[nn.Module]:
    """One class for all layers of a class, so that blocks share one compiled graph."""
    return type(f"Nf4{cls.__name__}", (Nf4, cls), {})


@dataclass(frozen=True, slots=True)
class Quantised:
    """What is stored in NF4: layers, and modules of experts, by name."""

    layers: dict[str, nn.Linear]
    experts: dict[str, nn.Module]

    def weights(self) -> dict[str, Any]:
        """Their weights by name. A tied one is there once."""
        found: dict[str, Any] = {f"{n}.weight": layer.weight for n, layer in self.layers.items()}
        for name, module in self.experts.items():
            found |= {f"{name}.{stack}": getattr(module, stack) for stack in STACKS}
        return {name: weight for weight, name in {w: n for n, w in found.items()}.items()}


def find_quantised(model: nn.Module) -> Quantised:
    """Plain linear layers but not the head and no routers, and experts that are stacked in one
    tensor. Raises for weights that cannot be quantised."""
    head = head_of(model)
    found = Quantised(
        {
            name: layer
            for name, layer in model.named_modules()
            if type(layer) is nn.Linear
            and layer is not head
            and name.rpartition(".")[2] not in ROUTER_NAMES
        },
        {name: module for name, module in model.named_modules() if _has_stacks(module)},
    )
    for name, module in found.experts.items():
        if find_form(module) is not SWIGLU:
            raise UserError(
                f"adapter.base=nf4 cannot store the experts of {name} yet",
                why="experts in NF4 must be plain SwiGLU without biases",
                fix="leave adapter.base out",
            )
    for name, weight in found.weights().items():
        _validate_width(name, weight.shape[-1])
    if not found.layers and not found.experts:
        raise UserError(
            "adapter.base=nf4 is for linear layers, and the model has none besides its head",
            fix="leave adapter.base out",
        )
    return found


def apply_nf4(model: nn.Module) -> None:
    """Quantise a model, on meta or with weights. Tied weights stay tied. Adapters come later."""
    quantised = find_quantised(model)
    made = {weight: pack_weight(weight) for weight in quantised.weights().values()}
    for layer in quantised.layers.values():
        changed: Any = layer
        kind: Any = type(layer)
        changed.weight = made[changed.weight]
        changed.__class__ = _quantised(kind)
    for experts in quantised.experts.values():
        for stack in STACKS:
            setattr(experts, stack, made[getattr(experts, stack)])
        take_over(experts)


def count_packed(model: nn.Module) -> dict[str, int]:
    """The sizes of what would be quantised of a model on meta, as `AdapterSpec` has them."""
    shapes = [tuple(weight.shape) for weight in find_quantised(model).weights().values()]
    sizes = [prod(shape) for shape in shapes]
    num_bytes = sum(prod(shape[:-1]) * row_bytes(shape[-1]) for shape in shapes)
    return {
        "packed_params": sum(sizes),
        "packed_bytes": num_bytes,
        "largest_packed": max(sizes),
    }


def _has_stacks(module: nn.Module) -> bool:
    return any(getattr(getattr(module, stack, None), "ndim", 0) == 3 for stack in STACKS)


def _refuse_cast() -> UserError:
    return UserError(
        "adapter.base=nf4 does not work with this model",
        why="its code casts what goes into a layer to the dtype of the layer's weight",
        fix="leave adapter.base out",
    )


def _validate_width(name: str, width: int) -> None:
    if width % BLOCK:
        raise UserError(
            f"adapter.base=nf4 cannot store {name}: its rows have {width} weights",
            why=f"{BLOCK} weights of a row share a scale, so rows must be multiples of {BLOCK}",
            fix="leave adapter.base out",
        )
