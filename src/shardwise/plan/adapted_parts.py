"""Adapters in a plan: what is trained, and what is frozen."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.facts.adapter_sizes import BASE_NAMES, AdapterSpec
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice
from shardwise.units import format_bytes, format_count


def _say_packed(adapter: AdapterSpec, *, has_experts: bool) -> str:
    """What is stored in four bits or in eight."""
    name, bits = BASE_NAMES[adapter.packing], 8 * adapter.packed_bytes / adapter.packed_params
    stored = (
        f"{format_count(adapter.packed_params)} frozen weights are in {name}, {bits:.2f} bits each "
        f"({format_bytes(adapter.packed_bytes)})"
    )
    if adapter.packing != "float8":
        return f"{stored}, and become floats in each layer's forward and backward"
    return f"{stored}; experts become floats where they compute" if has_experts else stored


_MOST_NAMED = 4


def choose_adapter(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> Choice[str]:
    """The user's method, and how much of the model it trains."""
    adapter = model.adapter
    if adapter is None:
        return Choice("none", "not asked for: all parameters are trained", "rule")
    trained, share = format_count(adapter.num_params), adapter.num_params / model.total_params
    parts = [
        f"given; {trained} parameters are trained ({share:.2%}), of rank {config.adapter.rank} in "
        f"{adapter.num_layers} layers",
        "all others are frozen, without gradients, masters and Adam",
    ]
    if adapter.whole:
        names = ", ".join(adapter.whole[:_MOST_NAMED])
        more = len(adapter.whole) - _MOST_NAMED
        parts.append(f"trained whole: {names}{f' and {more} more' if more > 0 else ''}")
    if adapter.packed_params:
        parts.append(_say_packed(adapter, has_experts=model.num_experts > 1))
    if adapter.left:
        parts.append(f"no adapters in {', '.join(adapter.left)}")
    if cluster.device == "cuda" and config.train.kernels != "torch":
        parts.append("layers with adapters are not part of our kernels for MLPs and experts")
    return Choice(config.adapter.method, "; ".join(parts), "user")
