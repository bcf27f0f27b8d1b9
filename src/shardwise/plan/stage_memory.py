"""The memory of a run's ranks where each of them has some of the blocks.

What a rank has is described as a model of its own, so that one set of formulas serves both. Beside
that rank's own peak there are the activations of the micro-batches that are on their way, and the
hidden states and gradients that PyTorch's schedules keep room for.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.activations import activations_of
from shardwise.plan.decisions import Decisions
from shardwise.plan.memory import estimate_memory, memory_over_step
from shardwise.plan.planned import MemoryEstimate
from shardwise.plan.schedule import Pipeline, most_in_flight
from shardwise.plan.stage_cuts import sent_bytes, stage_ranges
from shardwise.plan.stage_recompute import on_rank


def estimate_largest(model: ModelSpec, cluster: ClusterSpec, decided: Decisions) -> MemoryEstimate:
    """Expected bytes at the peak of the rank that needs most."""
    if decided.pipeline == 1:
        return estimate_memory(model, cluster, decided)
    return max(memory_of_ranks(model, cluster, decided), key=lambda each: each.total)


def largest_over_step(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions
) -> dict[str, MemoryEstimate]:
    """What that rank holds over a step."""
    if decided.pipeline == 1:
        return memory_over_step(model, cluster, decided)
    totals = [each.total for each in memory_of_ranks(model, cluster, decided)]
    rank = totals.index(max(totals))
    part, decided = part_of_rank(model, decided, rank), on_rank(decided, rank)
    moments = memory_over_step(part, cluster, replace(decided, pipeline=1))
    idle = ("between steps", "optimizer")
    return {
        where: each if where in idle else _on_their_way(each, part, model, decided, rank)
        for where, each in moments.items()
    }


def memory_of_ranks(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions
) -> list[MemoryEstimate]:
    """Expected bytes at the peak of each rank of a pipeline."""
    ranks = range(decided.pipeline)
    return [memory_of_rank(model, cluster, decided, rank) for rank in ranks]


def memory_of_rank(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, rank: int
) -> MemoryEstimate:
    """Those of one of them."""
    part, own = part_of_rank(model, decided, rank), on_rank(decided, rank)
    alone = estimate_memory(part, cluster, replace(own, pipeline=1))
    return _on_their_way(alone, part, model, own, rank)


def part_of_rank(model: ModelSpec, decided: Decisions, rank: int) -> ModelSpec:
    """What a rank of a pipeline has, as a model. Blocks that differ count by their mean. Of a tied
    table the first and the last rank have a copy each."""
    stages = stage_ranges(decided.pipeline_blocks)
    blocks = sum(len(stage) for stage in stages[rank :: decided.pipeline])
    has_head = rank == decided.pipeline - 1
    outside = model.embedding_params + model.tail_params
    all_blocks = model.total_params - outside
    table = model.embedding_params if rank == 0 else 0
    tail = model.tail_params + (model.embedding_params if model.tied_embeddings else 0)
    tail = tail if has_head else 0
    share = blocks / model.num_layers
    head = model.vocab_size * model.hidden_size if has_head else 0
    kinds = tuple(replace(kind, count=round(kind.count * share) or 1) for kind in model.kinds)
    if len(kinds) == 1:
        kinds = (replace(kinds[0], count=blocks),)
    return replace(
        model,
        num_layers=blocks if not kinds else sum(kind.count for kind in kinds),
        kinds=kinds,
        vocab_size=model.vocab_size if has_head else 0,
        tied_embeddings=False,
        embedding_params=table,
        tail_params=tail,
        total_params=round(all_blocks * share) + table + tail,
        matmul_params_per_token=round(model.block_matmul_params_per_token * share) + head,
    )


def _on_their_way(
    alone: MemoryEstimate, part: ModelSpec, model: ModelSpec, decided: Decisions, rank: int
) -> MemoryEstimate:
    chunks, stages = decided.pipeline_chunks, decided.pipeline * decided.pipeline_chunks
    one = (1.0,) * stages
    pipeline = Pipeline(decided.pipeline_schedule, decided.pipeline, decided.accumulation, one, one)
    more = most_in_flight(pipeline, rank) / chunks - 1
    kept = activations_of(part, replace(decided, pipeline=1)).kept
    # The first stage receives no hidden states, and the last one no gradients.
    buffers = 2 * chunks - (rank == 0) - (rank == decided.pipeline - 1)
    return replace(
        alone,
        activations=alone.activations + max(0, int(more * kept)),
        buffers=alone.buffers + buffers * decided.accumulation * sent_bytes(model, decided),
    )
