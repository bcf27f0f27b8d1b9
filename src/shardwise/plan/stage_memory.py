"""The memory of a run's ranks where each of them has some of the blocks.

What a rank has is described as a model of its own, so that one set of formulas serves both. Beside
that rank's own peak there are the activations of the micro-batches that are on their way, and the
hidden states and gradients that PyTorch's schedules keep room for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.activations import activations_of
from shardwise.plan.decisions import Decisions
from shardwise.plan.memory import estimate_memory, estimate_with, memory_over_step
from shardwise.plan.planned import MemoryEstimate
from shardwise.plan.schedule import Pipeline, most_in_flight
from shardwise.plan.stage_cuts import blocks_of_ranks, sent_bytes
from shardwise.plan.stage_recompute import RecomputeMode, modes_of, on_rank


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
    own = replace(decided, pipeline=1)
    kept = activations_of(part, own).kept
    moments = memory_over_step(part, cluster, own)
    idle = ("between steps", "optimizer")
    return {
        where: each if where in idle else _on_their_way(_Alone(each, kept), model, decided, rank)
        for where, each in moments.items()
    }


def memory_of_ranks(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions
) -> list[MemoryEstimate]:
    """Expected bytes at the peak of each rank of a pipeline."""
    return FormMemory(model, cluster, decided).of_ranks(decided)


def memory_of_rank(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, rank: int
) -> MemoryEstimate:
    """Those of one of them."""
    blocks, mode = blocks_of_ranks(decided)[rank], modes_of(decided)[rank]
    return FormMemory(model, cluster, decided).of_rank(rank, blocks, mode)


class RankPart(NamedTuple):
    """What a rank of a pipeline has."""

    blocks: int
    is_first: bool
    is_last: bool


class _Alone(NamedTuple):
    """What a rank would need without the others, and what a micro-batch keeps until backward."""

    memory: MemoryEstimate
    kept: float


@dataclass(frozen=True, slots=True)
class FormMemory:
    """The memory of a pipeline's ranks with steps of one form, whatever blocks each of them has and
    however it recomputes them. A search asks for the same again and again, so all is kept."""

    model: ModelSpec
    cluster: ClusterSpec
    form: Decisions
    """The decisions that all ranks share; blocks and recompute are not read."""

    parts: dict[RankPart, ModelSpec] = field(default_factory=dict, repr=False)
    """Models of what ranks have, for other forms too."""

    ways: dict[RecomputeMode, Decisions] = field(default_factory=dict, repr=False)
    """The decisions of a rank without the others."""

    alone: dict[tuple[RankPart, RecomputeMode], _Alone] = field(default_factory=dict, repr=False)
    known: dict[tuple[int, int, RecomputeMode], MemoryEstimate] = field(
        default_factory=dict, repr=False
    )

    def of_ranks(self, decided: Decisions) -> list[MemoryEstimate]:
        """Of each rank with the blocks and the recompute of decisions of this form."""
        has = zip(blocks_of_ranks(decided), modes_of(decided), strict=True)
        return [self.of_rank(rank, blocks, mode) for rank, (blocks, mode) in enumerate(has)]

    def of_rank(self, rank: int, blocks: int, mode: RecomputeMode) -> MemoryEstimate:
        """Of a rank with so many blocks that it recomputes so."""
        key = (rank, blocks, mode)
        if key not in self.known:
            part = RankPart(blocks, rank == 0, rank == self.form.pipeline - 1)
            alone = self._alone(part, mode)
            self.known[key] = _on_their_way(alone, self.model, self.form, rank)
        return self.known[key]

    def _alone(self, part: RankPart, mode: RecomputeMode) -> _Alone:
        key = (part, mode)
        if key not in self.alone:
            if part not in self.parts:
                self.parts[part] = model_of_part(self.model, part)
            if mode not in self.ways:
                self.ways[mode] = replace(self.form, checkpoint_activations=mode, pipeline=1)
            model, own = self.parts[part], self.ways[mode]
            blocks = activations_of(model, own)
            memory = estimate_with(blocks, model, self.cluster, own)
            self.alone[key] = _Alone(memory, blocks.kept)
        return self.alone[key]


def part_of_rank(model: ModelSpec, decided: Decisions, rank: int) -> ModelSpec:
    """What a rank of a pipeline has, as a model."""
    last = decided.pipeline - 1
    return model_of_part(model, RankPart(blocks_of_ranks(decided)[rank], rank == 0, rank == last))


def model_of_part(model: ModelSpec, part: RankPart) -> ModelSpec:
    """A rank's part as a model. Blocks that differ count by their mean. Of a tied table the first
    and the last rank have a copy each."""
    blocks = part.blocks
    outside = model.embedding_params + model.tail_params
    all_blocks = model.total_params - outside
    table = model.embedding_params if part.is_first else 0
    tail = model.tail_params + (model.embedding_params if model.tied_embeddings else 0)
    tail = tail if part.is_last else 0
    share = blocks / model.num_layers
    head = model.vocab_size * model.hidden_size if part.is_last else 0
    kinds = tuple(replace(kind, count=round(kind.count * share) or 1) for kind in model.kinds)
    if len(kinds) == 1:
        kinds = (replace(kinds[0], count=blocks),)
    return replace(
        model,
        num_layers=blocks if not kinds else sum(kind.count for kind in kinds),
        kinds=kinds,
        vocab_size=model.vocab_size if part.is_last else 0,
        tied_embeddings=False,
        embedding_params=table,
        tail_params=tail,
        total_params=round(all_blocks * share) + table + tail,
        matmul_params_per_token=round(model.block_matmul_params_per_token * share) + head,
    )


def _on_their_way(alone: _Alone, model: ModelSpec, decided: Decisions, rank: int) -> MemoryEstimate:
    """The same with the micro-batches of other ranks that are on their way."""
    chunks, stages = decided.pipeline_chunks, decided.pipeline * decided.pipeline_chunks
    one = (1.0,) * stages
    pipeline = Pipeline(decided.pipeline_schedule, decided.pipeline, decided.accumulation, one, one)
    more = most_in_flight(pipeline, rank) / chunks - 1
    # The first stage receives no hidden states, and the last one no gradients.
    buffers = 2 * chunks - (rank == 0) - (rank == decided.pipeline - 1)
    memory = alone.memory
    return replace(
        memory,
        activations=memory.activations + max(0, int(more * alone.kept)),
        buffers=memory.buffers + buffers * decided.accumulation * sent_bytes(model, decided),
    )
