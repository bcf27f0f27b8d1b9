"""Adapters as a plan asks for them."""

from __future__ import annotations

from torch import nn

from shardwise.model.lora import apply_lora, initialise_adapters
from shardwise.model.quantised import apply_base
from shardwise.parallel.precision import DTYPES
from shardwise.plan.decisions import multiplies_base
from shardwise.plan.planned import Plan


def has_adapters(plan: Plan) -> bool:
    """Whether the model's own weights are frozen."""
    return plan.decided.adapter != "none"


def apply_adapters(model: nn.Module, plan: Plan) -> None:
    """Freeze the model and give its layers adapters, where the plan has any. A model that holds
    weights gets adapters that hold their first values."""
    if not has_adapters(plan):
        return
    base, sizes = plan.settings.adapter.base, plan.model.adapter
    if base != "param":
        unpacked = () if sizes is None else sizes.unpacked
        apply_base(model, base, multiplies=multiplies_base(plan.decided), unpacked=unpacked)
    apply_lora(model, plan.settings.adapter, DTYPES[plan.decided.param_dtype])
    if not any(param.is_meta for param in model.parameters()):
        initialise_adapters(model, plan.settings.train.seed)
