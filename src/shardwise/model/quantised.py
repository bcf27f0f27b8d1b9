"""A frozen model whose linear layers and experts are rows of bytes: NF4 (QLoRA), float8, or as its
files have them.

FSDP2 shards the bytes of a weight by rows, gathers them as they are, and casts floats alone. Layers
make floats of them inside their forward and backward only, or multiply float8 as it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.facts.float8_size import MULTIPLE
from shardwise.kernels.float8_rows import Float8Product
from shardwise.kernels.packed_rows import PACKINGS, PackedProduct, Packing
from shardwise.model.expert_forms import STACKS, SWIGLU, ExpertForm, find_form
from shardwise.model.expert_lora import take_over
from shardwise.model.head import head_of
from shardwise.model.packed import pack_weight, turned
from shardwise.model.routers import ROUTER_NAMES

# The layer after attention, as Llama and similar families name it.
_ATTENTION_OUTPUT = "o_proj"
_AS_FLOATS = "write adapter.base=param"


class Packed:
    """What a layer of packed rows has besides its own class. It comes first in the order of
    classes."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result."""
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with the weight, from floats that are made here and freed here."""
        _validate_input(self.weight, x)
        y: Tensor = PackedProduct.apply(x, self.weight, bias)
        return y


class Float8Packed(Packed):
    """The same where the layer multiplies float8 as it is stored."""

    after_attention: bool

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product. What goes into it is cast here."""
        _validate_input(self.weight, x)
        y: Tensor = Float8Product.apply(x, self.weight, self.after_attention)
        return y if bias is None else y + bias


@cache
def _quantised(cls: Any, kind: type[Packed]) -> type[nn.Module]:
    """One class for all layers of a class, so that blocks share one compiled graph."""
    return type(f"{kind.__name__}{cls.__name__}", (kind, cls), {})


@dataclass(frozen=True, slots=True)
class Quantised:
    """What is stored as packed rows: layers, and modules of experts, by name."""

    layers: dict[str, nn.Linear]
    experts: dict[str, nn.Module]

    def weights(self) -> dict[str, Any]:
        """Their weights by name. A tied one is there once."""
        found: dict[str, Any] = {f"{n}.weight": layer.weight for n, layer in self.layers.items()}
        for name, module in self.experts.items():
            found |= {f"{name}.{stack}": getattr(module, stack) for stack in STACKS}
        return {name: weight for weight, name in {w: n for n, w in found.items()}.items()}


def find_quantised(model: nn.Module, base: str, unpacked: Collection[str] = ()) -> Quantised:
    """Plain linear layers but not the head and no routers, and experts that are stacked in one
    tensor; of a format that files have, those that they have in it. `unpacked` are names or
    patterns of modules that they have as floats. Raises for weights that cannot be packed."""
    head, packing = head_of(model), PACKINGS[dtype_of(base)]
    there = {
        name: module
        for name, module in model.named_modules()
        if not packing.is_shipped or _is_converted(name, unpacked)
    }
    found = Quantised(
        {
            name: layer
            for name, layer in there.items()
            if type(layer) is nn.Linear
            and not packing.is_turned
            and layer is not head
            and _last(name) not in ROUTER_NAMES
        },
        {name: module for name, module in there.items() if _has_stacks(module)},
    )
    for name, module in found.experts.items():
        _validate_experts(name, find_form(module), packing)
    for name, weight in found.weights().items():
        *_, width = turned(tuple(weight.shape), packing)
        _validate_width(name, width, packing)
    if not found.layers and not found.experts:
        kinds = "experts, and the model has none" if packing.is_turned else ""
        raise UserError(
            f"adapter.base={base} is for "
            + (kinds or "linear layers, and the model has none besides its head"),
            fix=_AS_FLOATS,
        )
    return found


def apply_base(
    model: nn.Module, base: str, *, multiplies: bool, unpacked: Collection[str] = ()
) -> None:
    """Pack the weights of a model, on meta or not. Tied weights stay tied. Adapters come later.

    `multiplies`: layers in float8 multiply as they are stored, where matmuls take their rows.
    """
    quantised, dtype = find_quantised(model, base, unpacked), dtype_of(base)
    forms = {experts: find_form(experts) for experts in quantised.experts.values()}
    made = {weight: pack_weight(weight, dtype) for weight in quantised.weights().values()}
    for name, layer in quantised.layers.items():
        changed: Any = layer
        cls: Any = type(layer)
        changed.weight = made[changed.weight]
        as_stored = multiplies and layer.out_features % MULTIPLE == 0
        changed.__class__ = _quantised(cls, Float8Packed if as_stored else Packed)
        if as_stored:
            changed.after_attention = _last(name) == _ATTENTION_OUTPUT
    for experts in quantised.experts.values():
        for stack in STACKS:
            setattr(experts, stack, made[getattr(experts, stack)])
        take_over(experts, forms[experts] or SWIGLU)


def count_packed(model: nn.Module, base: str, unpacked: Collection[str] = ()) -> dict[str, Any]:
    """The sizes of what would be packed of a model on meta, as `AdapterSpec` has them."""
    if base == "param":
        return {}
    weights = find_quantised(model, base, unpacked).weights().values()
    sizes = [weight.numel() for weight in weights]
    rows = [pack_weight(weight, dtype_of(base)) for weight in weights]
    return {
        "packing": base,
        "packed_params": sum(sizes),
        "packed_bytes": sum(each.nbytes for each in rows),
        "packed_tensors": len(rows),
        "largest_packed": max(sizes),
        "unpacked": tuple(unpacked),
    }


def dtype_of(base: str) -> torch.dtype:
    """The dtype of the rows of a value of `adapter.base`."""
    return next(dtype for dtype, packing in PACKINGS.items() if packing.base == base)


def _is_converted(name: str, unpacked: Collection[str]) -> bool:
    """Whether files have a module packed, by the names that config.json leaves out: each is a
    pattern of the beginning of a name, up to the end of one of its parts, or the end of a name."""
    return not any(
        re.match(rf"(?:{each})(?:(?<=\.)|\.|$)", name) or name.endswith(each) for each in unpacked
    )


def _has_stacks(module: nn.Module) -> bool:
    return any(getattr(getattr(module, stack, None), "ndim", 0) == 3 for stack in STACKS)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _validate_input(weight: Tensor, x: Tensor) -> None:
    if not x.is_floating_point():
        # Code that casts to the dtype of a layer's weight would cast to bytes.
        raise UserError(
            f"adapter.base={PACKINGS[weight.dtype].base} does not work with this model",
            why="its code casts what goes into a layer to the dtype of the layer's weight",
            fix=_AS_FLOATS,
        )


def _validate_experts(name: str, form: ExpertForm | None, packing: Packing) -> None:
    if form is None:
        raise UserError(
            f"adapter.base={packing.base} cannot store the experts of {name} yet",
            why=f"experts in {packing.name} must be SwiGLU, plain as Mixtral's or clamped as "
            "gpt-oss's, and their code computes something else",
            fix=_AS_FLOATS,
        )
    if packing.is_turned and not form.is_transposed:
        raise UserError(
            f"adapter.base={packing.base} cannot store the experts of {name}",
            why=f"{packing.name} is read for experts whose matrices are (in, out), as gpt-oss's, "
            "and these are (out, in)",
            fix=_AS_FLOATS,
        )


def _validate_width(name: str, width: int, packing: Packing) -> None:
    if width % packing.multiple:
        raise UserError(
            f"adapter.base={packing.base} cannot store {name}: its rows have {width} weights",
            why=f"{packing.why_multiple}, so rows must be multiples of {packing.multiple}",
            fix=_AS_FLOATS,
        )
