"""Float8 in the linear layers of blocks, by torchao. Modules, names and fp32 master weights stay.

torchao is imported where it is first needed: it is optional, and takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.facts.gpus import FLOAT8_CAPABILITY
from shardwise.kernels.float8 import cast
from shardwise.kernels.own import uses_own
from shardwise.model.blocks import Unit, UnitMap
from shardwise.model.override import override_forward
from shardwise.model.routers import ROUTER_NAMES
from shardwise.parallel.float8_linear import Float8GatedMLP, Linear
from shardwise.parallel.gated_mlp import PARTS, activation_of, gated_forward
from shardwise.plan.float8_rules import (
    is_float8,
    no_float8_here,
    no_layer_fits,
    validate_torchao,
    why_not_float8,
)
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import num_shards

# The layer after attention, as Llama and similar families name it.
_ATTENTION_OUTPUT = ".o_proj"


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer, or one stack of experts, and what happens to it."""

    name: str
    num_weights: int
    why_not: str | None
    """Why it stays as it is; None: it multiplies in float8."""

    gathers_float8: bool
    """Whether its weight is cast before it is gathered."""


def apply_float8(model: nn.Module, units: UnitMap, plan: Plan) -> None:
    """Convert the linear layers that float8 suits. This comes before every other change to a
    model."""
    linear = plan.decided.linear
    if not is_float8(linear):
        return
    validate_torchao(linear)
    _validate_device(plan)
    layers = float8_layers(model, units, plan)
    if all(layer.why_not for layer in layers):
        reasons = sorted({layer.why_not or "" for layer in layers})
        raise no_layer_fits(linear, type(model).__name__, reasons)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = "rowwise" if linear == "float8_rowwise" else "tensorwise"
    # A CPU has the format but not the arithmetic, so it computes the same numbers in fp32.
    base = replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=plan.cluster.device == "cpu"
    )
    for gathers in (True, False):
        names = {x.name for x in layers if not x.why_not and x.gathers_float8 is gathers}
        if names:
            convert_to_float8_training(
                model,
                module_filter_fn=lambda _, name, names=names: name in names,
                config=replace(base, enable_fsdp_float8_all_gather=gathers),
            )
    if recipe == "tensorwise" and _casts_itself(plan):
        take_own_arithmetic(model, {layer.name for layer in layers if not layer.why_not})


def take_own_arithmetic(model: nn.Module, names: set[str]) -> None:
    """Let converted layers multiply by `float8_linear`, and those of a gated MLP as one
    operation."""
    modules = dict(model.named_modules())
    outputs = {name for name in names if name.endswith(_ATTENTION_OUTPUT)}
    others = [modules[name] for name in sorted(names - outputs)]
    override_forward(others, "Own", lambda cls: _linear_forward)
    after_attention = [modules[name] for name in sorted(outputs)]
    override_forward(after_attention, "OwnOutput", lambda cls: _output_forward)
    gated = [
        module
        for name, module in modules.items()
        if all(f"{name}.{part}" in names for part in PARTS)
        and not any(modules[f"{name}.{part}"].bias is not None for part in PARTS)
        and activation_of(module) == "silu"
    ]
    override_forward(gated, "Float8", lambda cls: gated_forward(Float8GatedMLP))


def _linear_forward(self: Any, x: Tensor, after_attention: bool = False) -> Tensor:
    y: Tensor = Linear.apply(x, self.weight, after_attention)
    return y if self.bias is None else y + self.bias.to(y.dtype)


def _output_forward(self: Any, x: Tensor) -> Tensor:
    return _linear_forward(self, x, after_attention=True)


def float8_layers(model: nn.Module, units: UnitMap, plan: Plan) -> list[Layer]:
    """Every linear layer and every stack of experts; the same before and after the conversion."""
    if not is_float8(plan.decided.linear):
        return []
    blocks = tuple(f"{name}." for unit in units.blocks for name in unit.modules)
    layers, shards = [], num_shards(plan.decided)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why_not = _why_not(name, module, f"{name}.".startswith(blocks), plan)
            # FSDP2 pads rows that do not divide, which it cannot do with a shard that is already
            # cast.
            gathers = plan.decided.float8_gather and module.out_features % shards == 0
            size = module.in_features * module.out_features
            layers.append(Layer(name, size, why_not, gathers and not why_not))
        for key, param in module.named_parameters(recurse=False):
            stack = f"{name}.{key}"
            if param.dim() == 3 and "expert" in stack:
                layers.append(Layer(stack, param.numel(), "stacked in one tensor", False))
    return layers


def gathered_in_float8(unit: Unit, layers: Sequence[Layer]) -> int:
    """How many weights of a unit are all-gathered in float8."""
    inside = tuple(f"{name}." for name in unit.modules)
    ours = (layer for layer in layers if f"{layer.name}.".startswith(inside))
    return sum(layer.num_weights for layer in ours if layer.gathers_float8)


def refresh_scales(model: nn.Module, plan: Plan) -> None:
    """Compute the scales of all weights that are all-gathered in float8, with one all-reduce.

    Call it after every change of the parameters: a cast with an old scale clips values that have
    grown. In a model that was never refreshed, every all-gather computes its own scales, with an
    all-reduce for each weight.
    """
    if plan.decided.float8_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
        if _casts_itself(plan):
            _gather_in_one_pass(model)


def _casts_itself(plan: Plan) -> bool:
    """Whether our operators cast: on a CPU they are plain torch."""
    return uses_own(plan) or plan.cluster.device == "cpu"


@torch.no_grad()
def _gather_in_one_pass(model: nn.Module) -> None:
    """Let our operator cast shards that have a scale: torchao's cast is three kernels for each
    weight.

    The shards get a subclass, as modules do whose forward is overridden. Tensors that torch derives
    from a shard are of torchao's own class again, so call this right after the scales are set.
    """
    made: dict[type, type] = {}
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        cls = type(local)
        if hasattr(cls, "fsdp_pre_all_gather") and not hasattr(cls, "casts_in_one_pass"):
            if cls not in made:
                body = {"fsdp_pre_all_gather": _pre_all_gather, "casts_in_one_pass": True}
                made[cls] = type(f"OnePass{cls.__name__}", (cls,), body)
            local.__class__ = made[cls]


def _pre_all_gather(self: Any, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """FSDP2's hook: the tensors to all-gather, and metadata for the hook after it."""
    scale = self._precomputed_scale
    return (cast(self._tensor, scale, self._dtype),), (scale,)


def bare(tensor: Tensor) -> Tensor:
    """The fp32 tensor that torchao's wrapper of a weight holds, in the same memory."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        inner = bare(local)
        if inner is local:
            return tensor
        layout: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(
            inner, tensor.device_mesh, tensor.placements, run_check=False, **layout
        )
    # The wrapper is recognised by FSDP2's protocol, and survives only some operators.
    return tensor.expand_as(tensor) if hasattr(tensor, "fsdp_pre_all_gather") else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same way."""
    inner = bare(tensor)
    return inner.to_local() if isinstance(inner, DTensor) else inner


def _why_not(name: str, module: nn.Linear, in_block: bool, plan: Plan) -> str | None:
    last = name.split(".")[-1]
    if not in_block:
        return "outside the blocks"
    if last in ROUTER_NAMES:
        return "a router"
    if "lora_" in name:
        return "a LoRA layer"
    least = plan.settings.precision.float8_min_features
    return why_not_float8(module.in_features, module.out_features, least)


def _validate_device(plan: Plan) -> None:
    """Raise where this device cannot compute float8: it may be another than the plan's."""
    if plan.cluster.device != "cuda" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        raise no_float8_here(plan.decided.linear, torch.cuda.get_device_name())
