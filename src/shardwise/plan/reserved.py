"""What a rank's device holds besides the tensors of a step: the buffer of reductions, the pools of
the allocator, CUDA's context and NCCL's buffers."""

from __future__ import annotations

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import DTYPE_BYTES, Decisions
from shardwise.plan.rank_share import block_share, num_shards
from shardwise.plan.unit_sizes import head_params, trained_sizes
from shardwise.units import GIB

# CUDA's context, and NCCL's buffers where there are several ranks. torch reports neither.
CONTEXT_BYTES = {"cuda": int(0.82 * GIB), "cpu": int(0.3 * GIB)}
NCCL_BYTES = int(1.0 * GIB)
# What the allocator reserves besides, for its pages and the pools of other streams: 18 rows of
# dense models on an H200 as rank 0 of 8 had 0.25 to 0.45 GiB, and five had up to 1.8.
POOL_BYTES = int(0.4 * GIB)
# Blocks of experts gather and reduce tensors that no activation may have left room for. In 13 rows
# six mixtures had 0.4 to 2.6 bytes for each parameter of a block, 1.8 in the median; one GPU alone
# had 0 and 3.8, and 12 in one row.
POOL_BYTES_PER_EXPERT_PARAM = 1.6


def has_reduce_buffer(model: ModelSpec, decided: Decisions, cluster: ClusterSpec) -> bool:
    """Whether one buffer is kept for the inputs of all reduce-scatters on a GPU.

    It is as large as the largest unit in the dtype of the reduction. It would lie idle at the peak
    where the loss does not use it: with all logits at once, with a tied head, whose gradient is
    reduced at the end of backward, or with a frozen one. Where a head and its embedding are in
    different stages, each has a gradient of its own.
    """
    is_tied = model.tied_embeddings and decided.pipeline == 1
    sums_head = model.adapter is None and not is_tied
    shares = decided.slice_tokens is not None and sums_head
    return cluster.device == "cuda" and num_shards(decided) > 1 and shares


def reduce_buffer_bytes(model: ModelSpec, decided: Decisions, cluster: ClusterSpec) -> int:
    """Bytes of that buffer, 0 where there is none."""
    if not has_reduce_buffer(model, decided, cluster):
        return 0
    head, params = head_params(model, decided), block_share(model, decided)
    return max(4 * head, DTYPE_BYTES[decided.reduce_dtype] * max(head, params))


def pool_bytes(model: ModelSpec, cluster: ClusterSpec, decided: Decisions, kept: float) -> int:
    """What the allocator reserves besides, where blocks keep so many bytes until backward."""
    if cluster.device == "cpu":
        return 0
    experts = expert_pool_bytes(model, cluster, decided)
    return POOL_BYTES + experts + _embedding_pool_bytes(model, cluster, decided, kept)


def _embedding_pool_bytes(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, kept: float
) -> int:
    """What the reduction of a tied embedding's gradient takes beyond what is reserved by then.

    It is the last and the largest. Without the buffer it lies where activations were, or where
    they are fewer, at new addresses: Gemma 3 12B with full recompute on an H200 reserved 2.9 GiB
    more than with others, and 2.9 are the difference to the reduction of a block.
    """
    if num_shards(decided) == 1 or has_reduce_buffer(model, decided, cluster):
        return 0
    reduce, trained = DTYPE_BYTES[decided.reduce_dtype], trained_sizes(model, decided)
    more = reduce * max(0, trained.table - trained.block)
    return more if model.tied_embeddings and kept < more else 0


def expert_pool_bytes(model: ModelSpec, cluster: ClusterSpec, decided: Decisions) -> int:
    """What of it blocks of experts may be the reason for."""
    if cluster.device == "cpu" or model.num_experts == 1:
        return 0
    return int(POOL_BYTES_PER_EXPERT_PARAM * block_share(model, decided))


def context_bytes(cluster: ClusterSpec) -> int:
    """What lies outside of torch's allocator."""
    several = cluster.device == "cuda" and cluster.world_size > 1
    return CONTEXT_BYTES[cluster.device] + (NCCL_BYTES if several else 0)
