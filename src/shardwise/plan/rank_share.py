"""What one rank has of a model whose matrices are cut by the tensor axis, and whose experts are
dealt out by the expert axis.

A matrix is cut into as many parts as the tensor axis has ranks. FSDP2 shards each part over the
ranks of `shard` and `context` together, because ranks of one context group hold the same
parameters. Experts of a block lie on their own axis, whose ranks are those of `shard`, `context`
and `tensor`: each group has whole experts, and shards them over the ranks with the same experts.
Norms and routers, which the tensor axis does not cut, are too small to count.
"""

from __future__ import annotations

from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions


def num_shards(decided: Decisions) -> int:
    """Ranks that FSDP2 shards a part of a matrix over."""
    return decided.shard * decided.context


def num_expert_shards(decided: Decisions) -> int:
    """Ranks that FSDP2 shards an expert over: those that have the same experts."""
    if decided.expert == 1:
        return num_shards(decided)
    return max(1, num_shards(decided) * decided.tensor // decided.expert)


def num_expert_parts(decided: Decisions) -> int:
    """Parts that the experts of a block are in: whole experts, or slices of all of them."""
    return decided.tensor if decided.expert == 1 else decided.expert


def num_expert_blocks(model: ModelSpec) -> int:
    """Blocks that have experts."""
    if model.num_experts == 1:
        return 0
    if not model.kinds:
        return model.num_layers
    return sum(
        kind.count for kind in model.kinds if any(matmul.groups > 1 for matmul in kind.work.matmuls)
    )


def block_share(model: ModelSpec, decided: Decisions) -> int:
    """The parameters of a block that one rank gathers."""
    dense = (model.block_params - model.expert_params) // decided.tensor
    return dense + model.expert_params // num_expert_parts(decided)


def model_share(model: ModelSpec, decided: Decisions) -> int:
    """The same for the whole model."""
    experts = model.expert_params * num_expert_blocks(model)
    return (model.total_params - experts) // decided.tensor + experts // num_expert_parts(decided)


def kept_experts(model: ModelSpec, decided: Decisions) -> int:
    """The experts that stay gathered on a rank from forward to backward, where all else is
    freed."""
    if not decided.keeps_experts or decided.keeps_gathered:
        return 0
    return model.expert_params // num_expert_parts(decided) * num_expert_blocks(model)


def stored_params(model: ModelSpec, decided: Decisions) -> int:
    """The parameters of a rank's shards."""
    experts = model.expert_params * num_expert_blocks(model)
    parts = num_expert_parts(decided) * num_expert_shards(decided)
    dense = decided.tensor * num_shards(decided)
    return -(-((model.total_params - experts) * parts + experts * dense) // (dense * parts))


def trained_share(model: ModelSpec, decided: Decisions) -> int:
    """Those parameters of a rank's shards that have gradients and optimizer state."""
    if model.adapter is None:
        return stored_params(model, decided)
    return -(-model.trained_params // (decided.tensor * num_shards(decided)))


def trained_block_share(model: ModelSpec, decided: Decisions) -> float:
    """Those of one block's."""
    if model.adapter is not None:
        return model.adapter.largest_unit / (decided.tensor * num_shards(decided))
    dense = (model.block_params - model.expert_params) / decided.tensor / num_shards(decided)
    return dense + model.expert_params / num_expert_parts(decided) / num_expert_shards(decided)


def whole_gradients(model: ModelSpec, decided: Decisions) -> int:
    """Gradients of what a rank gathers, which it keeps whole while it accumulates."""
    if model.adapter is None:
        return model_share(model, decided)
    return model.trained_params // decided.tensor
