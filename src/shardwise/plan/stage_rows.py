"""The stages of a plan in words: what each rank of a pipeline has, needs and waits for."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.flops import recomputed_share
from shardwise.plan.planned import MemoryEstimate, Plan
from shardwise.plan.schedule import Pipeline, most_in_flight, seconds_of_step
from shardwise.plan.stage_cuts import head_in_blocks, stage_ranges
from shardwise.plan.stage_memory import memory_of_rank, memory_of_ranks
from shardwise.plan.stage_recompute import ALIKE, modes_of
from shardwise.units import format_bytes

# Backward computes two matmuls for each of forward's.
_BACKWARD = 2.0


def planned_bubble(plan: Plan) -> float:
    """The share of a step's forwards and backwards in which a rank waits for others, as a mean over
    ranks.

    Without rates it follows from FLOPs alone.
    """
    if plan.forecast is not None:
        terms = plan.forecast.terms
        outside = terms["optimizer"] + terms["other"]
        return terms["bubble"] / (plan.forecast.step_s - outside)
    pipeline = in_blocks(plan)
    busy = sum(map(pipeline.busy, range(pipeline.ranks))) / pipeline.ranks
    return 1 - busy / seconds_of_step(pipeline)


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """What a rank of a pipeline has, does and holds."""

    blocks: str
    """In words, with what it has besides."""

    work: float
    """How long it computes, as a share of the rank that computes longest."""

    under_way: float
    """The most micro-batches that it has begun and not ended."""

    memory: MemoryEstimate


def planned_ranks(plan: Plan) -> list[PlannedRank]:
    """Each rank of a pipeline; none where there is one stage."""
    decided = plan.decided
    if decided.pipeline == 1:
        return []
    pipeline = in_blocks(plan)
    most = max(map(pipeline.busy, range(pipeline.ranks)))
    memory = memory_of_ranks(plan.model, plan.cluster, decided)
    return [
        PlannedRank(
            _blocks_of(plan, rank),
            pipeline.busy(rank) / most,
            most_in_flight(pipeline, rank) / pipeline.chunks,
            memory[rank],
        )
        for rank in range(pipeline.ranks)
    ]


def first_rank_memory(plan: Plan) -> MemoryEstimate:
    """That of the rank whose memory a run tells; the plan's is that of the fullest."""
    if plan.decided.pipeline == 1:
        return plan.memory
    return memory_of_rank(plan.model, plan.cluster, plan.decided, 0)


def stage_rows(plan: Plan) -> list[tuple[str, str]]:
    """(what, figure) of each rank of a pipeline, and of how long they wait."""
    ranks, decided = planned_ranks(plan), plan.decided
    if not ranks:
        return []
    rows = [
        (
            f"stage {number}",
            f"{rank.blocks}; {format_bytes(rank.memory.total)}, {rank.work:.0%} of the longest "
            f"stage's work, {rank.under_way:g} micro-batches on their way",
        )
        for number, rank in enumerate(ranks)
    ]
    bubble = f"{planned_bubble(plan):.1%} of forwards and backwards, in which a rank waits"
    passes = f"{decided.accumulation} micro-batches by {decided.pipeline_schedule}"
    return [*rows, ("bubble", f"{bubble}: {passes}")]


def _blocks_of(plan: Plan, rank: int) -> str:
    """The blocks of a rank, with what it has besides."""
    stages = stage_ranges(plan.decided.pipeline_blocks)[rank :: plan.decided.pipeline]
    parts = [f"{stage[0]}-{stage[-1]}" if len(stage) > 1 else f"{stage[0]}" for stage in stages]
    several = "s" if sum(map(len, stages)) > 1 else ""
    words = [f"block{several} {' and '.join(parts)}"]
    if plan.decided.pipeline_recompute != ALIKE:
        words.append(f"recompute {modes_of(plan.decided)[rank]}")
    words += ["embedding"] if rank == 0 else []
    words += ["head and loss"] if rank == plan.decided.pipeline - 1 else []
    return ", ".join(words)


def in_blocks(plan: Plan) -> Pipeline:
    """The schedule in times of one block's forward."""
    decided = plan.decided
    blocks = [float(len(stage)) for stage in stage_ranges(decided.pipeline_blocks)]
    head = head_in_blocks(plan.model, decided.seq_len)
    # The loss computes the gradients of the head in forward.
    ahead = (*blocks[:-1], blocks[-1] + (1 + _BACKWARD) * head)
    again = [recomputed_share(mode) for mode in modes_of(decided)]
    backward = tuple(
        (_BACKWARD + again[stage % decided.pipeline]) * count for stage, count in enumerate(blocks)
    )
    return Pipeline(
        decided.pipeline_schedule,
        decided.pipeline,
        decided.accumulation,
        ahead,
        backward,
        in_slots=True,
    )
