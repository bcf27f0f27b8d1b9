"""Float8 in the linear layers of blocks, by torchao: the same modules, names and fp32 masters.

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
from shardwise.parallel.float8_linear import Float8GatedMLP, Linear
from shardwise.parallel.gated_mlp import PARTS, gated_forward, is_swiglu
from shardwise.plan.float8 import (
    is_float8,
    no_float8_here,
    no_layer_fits,
    validate_torchao,
    why_not_float8,
)
from shardwise.plan.plan import Plan

# Which expert a token goes to is decided by small differences, which float8 would blur.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg"})
# The layer that reads attention's result, as Llama and its kin name it.
_ATTENTION_OUTPUT = ".o_proj"


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer, or one stack of experts, and what becomes of it."""

    name: str
    num_weights: int
    why_not: str | None
    """Why it stays as it is; None: it multiplies in float8."""

    gathers_float8: bool
    """Whether its weight is cast before it is gathered."""


def apply_float8(model: nn.Module, units: UnitMap, plan: Plan) -> None:
    """Convert the linear layers that float8 is for. Before all else that is done to a model."""
    linear = plan.linear.value
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
    # A processor has the format but not the arithmetic: the same numbers by way of fp32.
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
    """Let converted layers multiply by `float8_linear`, and those of a gated MLP as one."""
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
        and is_swiglu(module)
    ]
    override_forward(gated, "Float8", lambda cls: gated_forward(Float8GatedMLP))


def _linear_forward(self: Any, x: Tensor, after_attention: bool = False) -> Tensor:
    y: Tensor = Linear.apply(x, self.weight, after_attention)
    return y if self.bias is None else y + self.bias.to(y.dtype)


def _output_forward(self: Any, x: Tensor) -> Tensor:
    return _linear_forward(self, x, after_attention=True)


def float8_layers(model: nn.Module, units: UnitMap, plan: Plan) -> list[Layer]:
    """Every linear layer and every stack of experts; the same before and after the conversion."""
    if not is_float8(plan.linear.value):
        return []
    blocks = tuple(f"{name}." for unit in units.blocks for name in unit.modules)
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why_not = _why_not(name, module, f"{name}.".startswith(blocks), plan)
            # FSDP2 pads rows that do not divide, which a shard that is already cast cannot be.
            gathers = plan.float8_gather.value and module.out_features % plan.shard.value == 0
            size = module.in_features * module.out_features
            layers.append(Layer(name, size, why_not, gathers and not why_not))
        for key, param in module.named_parameters(recurse=False):
            stack = f"{name}.{key}"
            if param.dim() == 3 and "expert" in stack:
                layers.append(Layer(stack, param.numel(), "stacked in one tensor", False))
    return layers


def gathered_in_float8(unit: Unit, layers: Sequence[Layer]) -> int:
    """How many weights of a unit are gathered in one byte each."""
    inside = tuple(f"{name}." for name in unit.modules)
    ours = (layer for layer in layers if f"{layer.name}.".startswith(inside))
    return sum(layer.num_weights for layer in ours if layer.gathers_float8)


def refresh_scales(model: nn.Module, plan: Plan) -> None:
    """Compute the scales of all weights that are gathered in float8, with one all-reduce.

    For whoever has changed the parameters: a cast with an old scale cuts off what has grown. In a
    model that was never refreshed every gather finds its own scales, an all-reduce for each weight.
    """
    if plan.float8_gather.value:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
        if _casts_itself(plan):
            _gather_in_one_pass(model)


def _casts_itself(plan: Plan) -> bool:
    """On a processor our operators are plain torch."""
    return uses_own(plan) or plan.cluster.device == "cpu"


@torch.no_grad()
def _gather_in_one_pass(model: nn.Module) -> None:
    """Let shards with a scale be cast by our operator: torchao's cast is three kernels a weight.

    They get a subclass as modules do whose forward is overridden; what torch makes of a shard is
    torchao's own class again, so this is for whoever has just set the scales.
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
    """What FSDP2 gathers, and what it hands on beside it."""
    scale = self._precomputed_scale
    return (cast(self._tensor, scale, self._dtype),), (scale,)


def bare(tensor: Tensor) -> Tensor:
    """The fp32 tensor, in the same memory, that torchao's wrapper of a weight holds."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        inner = bare(local)
        if inner is local:
            return tensor
        layout: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(
            inner, tensor.device_mesh, tensor.placements, run_check=False, **layout
        )
    # The wrapper is known by FSDP2's protocol for it, and survives only some operators.
    return tensor.expand_as(tensor) if hasattr(tensor, "fsdp_pre_all_gather") else tensor


def _why_not(name: str, module: nn.Linear, in_block: bool, plan: Plan) -> str | None:
    last = name.split(".")[-1]
    if not in_block:
        return "outside the blocks"
    if last in _ROUTERS:
        return "a router"
    if "lora_" in name:
        return "LoRA's own"
    least = plan.config.precision.float8_min_features
    return why_not_float8(module.in_features, module.out_features, least)


def _validate_device(plan: Plan) -> None:
    """The plan's cluster computes float8; what is here may be another device."""
    if plan.cluster.device != "cuda" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        raise no_float8_here(plan.linear.value, torch.cuda.get_device_name())
