"""The warnings of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.facts.quantization import FP8, MXFP4, quant_method
from shardwise.plan.rank_share import num_shards
from shardwise.plan.router_losses import left_out
from shardwise.plan.search import Option, fits
from shardwise.plan.strategy_mesh import MAX_PADDING, padding
from shardwise.units import format_bytes

# What files are quantised with, and what float8 with a power of two for each row makes of it.
_SHIPPED = {
    MXFP4: ("MXFP4", "holds each of their values"),
    FP8: ("fp8", "rounds once more where a scale of theirs is no power of two"),
}


def caveats(best: Option, config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> list[str]:
    """Warnings about memory that may not be enough, and about settings that do less or more than
    they say."""
    return [
        *_tight(best, cluster),
        *_padded_experts(config, model, num_shards(best.decided)),
        *_without_effect(config, cluster),
        *left_out(model, best.decided.router_aux_loss),
    ]


def expanded(config: RunConfig, hf_config: Mapping[str, Any], base: str) -> list[str]:
    """The warning for frozen weights that take more bytes than their files."""
    method = quant_method(hf_config) or ""
    if method not in _SHIPPED or config.adapter.method == "none" or base != "param":
        return []
    name, loss = _SHIPPED[method]
    kept = f"adapter.base={method} keeps their bytes" if config.adapter.base == "param" else ""
    return [
        f"the files are in {name}, and their weights are frozen in the format of precision.param, "
        f"with two bytes or four; {f'{kept}, ' if kept else ''}adapter.base=float8 keeps one byte "
        f"of each, and {loss}"
    ]


def _tight(best: Option, cluster: ClusterSpec) -> list[str]:
    """The warning for a plan that may not fit."""
    if fits(best.memory, cluster):
        return []
    expected, capacity = format_bytes(best.memory.total), format_bytes(cluster.memory_bytes)
    return [
        f"{expected} expected of {capacity}, up to {format_bytes(best.memory.high)} likely: it may "
        "run out of memory"
    ]


def _padded_experts(config: RunConfig, model: ModelSpec, shards: int) -> list[str]:
    """The warning for stacked experts that FSDP2 can cut only by expert, and pads."""
    group, experts = config.shard.reshard_after_forward, model.num_experts
    too_few = experts > 1 and padding(experts, shards) > MAX_PADDING
    if not too_few or isinstance(group, bool | str):
        return []
    return [
        f"shard.reshard_after_forward={group} makes every rank hold and move "
        f"{1 + padding(experts, shards):.1f} times its part of the experts, which the memory above "
        f"leaves out: FSDP2 reshards to groups along the first dim only, and {experts} stacked "
        f"experts are padded to {shards} ranks there; true and false cut another dim"
    ]


def _without_effect(config: RunConfig, cluster: ClusterSpec) -> list[str]:
    """The warning for a setting that only has an effect on GPUs."""
    if config.observe.memory_history and cluster.device == "cpu":
        return ["observe.memory_history has no effect here: torch keeps it for GPUs alone"]
    return []
