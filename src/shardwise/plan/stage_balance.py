"""Blocks that move from the fullest rank of a pipeline to the emptiest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.facts.flops import recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Decisions
from shardwise.plan.stage_cuts import blocks_of_stages, head_in_blocks
from shardwise.plan.stage_recompute import RecomputeMode

Weigh = Callable[[int, int], float]
"""Of a rank and the number of its blocks."""

LeastOn = Callable[[int, int], RecomputeMode | None]
"""The least recompute that fits on a rank with so many blocks; None where none does."""


def evened(decided: Decisions, weigh: Weigh) -> Decisions:
    """Blocks divided so that the heaviest rank is as light as moves of single blocks make it."""
    blocks, ranks = blocks_of_stages(decided), decided.pipeline
    weights = [weigh(rank, sum(blocks[rank::ranks])) for rank in range(ranks)]
    while True:
        heavy = max(range(ranks), key=weights.__getitem__)
        light = min(range(ranks), key=weights.__getitem__)
        moved = _moved(blocks, ranks, heavy, light)
        if moved is None:
            break
        changed = {rank: weigh(rank, sum(moved[rank::ranks])) for rank in (heavy, light)}
        if max(changed.values()) >= weights[heavy]:
            break
        blocks = moved
        for rank, weight in changed.items():
            weights[rank] = weight
    return replace(decided, pipeline_blocks="+".join(map(str, blocks)))


def work_of(model: ModelSpec, decided: Decisions, least_on: LeastOn) -> Weigh:
    """How long a rank computes, in forwards of a block, with the least recompute that fits on
    it."""
    # Backward takes twice as long as forward, and so it is with the head.
    head, last = 3 * head_in_blocks(model, decided.seq_len), decided.pipeline - 1

    def work(rank: int, blocks: int) -> float:
        mode = least_on(rank, blocks)
        if mode is None:
            return float("inf")
        return (3 + recomputed_share(mode)) * blocks + head * (rank == last)

    return work


def _moved(blocks: list[int], ranks: int, giver: int, taker: int) -> list[int] | None:
    """One block of the giver's largest stage in the taker's smallest; None where it has one."""
    largest = max(range(giver, len(blocks), ranks), key=blocks.__getitem__)
    if blocks[largest] == 1 or giver == taker:
        return None
    moved = list(blocks)
    moved[largest] -= 1
    moved[min(range(taker, len(blocks), ranks), key=moved.__getitem__)] += 1
    return moved
