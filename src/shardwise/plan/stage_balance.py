"""Blocks that move from the fullest rank of a pipeline to the emptiest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.facts.flops import recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions
from shardwise.plan.stage_cuts import head_in_blocks, stage_ranges
from shardwise.plan.stage_recompute import least_on

Weigh = Callable[[Decisions, int], float]


def evened(decided: Decisions, weigh: Weigh) -> Decisions:
    """Blocks divided so that the heaviest rank is as light as moves of single blocks make it."""
    ranks = range(decided.pipeline)
    weights = [weigh(decided, rank) for rank in ranks]
    while True:
        heavy = max(ranks, key=weights.__getitem__)
        light = min(ranks, key=weights.__getitem__)
        moved = _moved(decided, heavy, light)
        if moved is None:
            return decided
        changed = {rank: weigh(moved, rank) for rank in (heavy, light)}
        if max(changed.values()) >= weights[heavy]:
            return decided
        decided = moved
        for rank, weight in changed.items():
            weights[rank] = weight


def work_of(model: ModelSpec, fits_rank: Callable[[Decisions, int], bool]) -> Weigh:
    """How long a rank computes, in forwards of a block, with the least recompute that fits on
    it."""

    def work(decided: Decisions, rank: int) -> float:
        mode = least_on(decided, rank, fits_rank)
        if mode is None:
            return float("inf")
        stages = stage_ranges(decided.pipeline_blocks)[rank :: decided.pipeline]
        # Backward takes twice as long as forward, and so it is with the head.
        head = 3 * head_in_blocks(model, decided.seq_len) * (rank == decided.pipeline - 1)
        return (3 + recomputed_share(mode)) * sum(map(len, stages)) + head

    return work


def _moved(decided: Decisions, giver: int, taker: int) -> Decisions | None:
    """One block of the giver's largest stage in the taker's smallest; None where it has one."""
    blocks = [len(stage) for stage in stage_ranges(decided.pipeline_blocks)]
    num, ranks = len(blocks), decided.pipeline
    largest = max(range(giver, num, ranks), key=blocks.__getitem__)
    if blocks[largest] == 1 or giver == taker:
        return None
    blocks[largest] -= 1
    blocks[min(range(taker, num, ranks), key=blocks.__getitem__)] += 1
    return replace(decided, pipeline_blocks="+".join(map(str, blocks)))
