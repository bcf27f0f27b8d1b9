"""How much each rank of a pipeline recomputes.

With 1F1B the first rank keeps the activations of as many micro-batches as there are ranks, and the
last one those of one. So each recomputes no more than it must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from shardwise.facts.flops import recomputed_share
from shardwise.plan.decisions import Decisions
from shardwise.plan.stage_cuts import blocks_of_ranks

RecomputeMode = str | float
ALIKE = "-"
"""What stands for ranks that recompute alike."""

RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "selective", 0.25, 0.5, 0.75, "full")


def modes_in(words: str) -> list[RecomputeMode]:
    """The modes of ranks, from words such as full+0.5+none. ValueError where one is no mode."""
    return [_mode(word.strip()) for word in words.split("+")]


def in_words(modes: list[RecomputeMode]) -> str:
    """The modes of ranks in words; those of one kind are alike."""
    return ALIKE if len(set(modes)) == 1 else "+".join(map(str, modes))


def heaviest(modes: list[RecomputeMode]) -> RecomputeMode:
    """The one that recomputes most."""
    return max(modes, key=_weight)


def modes_of(decided: Decisions) -> list[RecomputeMode]:
    """By rank of the pipeline."""
    if decided.pipeline_recompute == ALIKE:
        return [decided.checkpoint_activations] * decided.pipeline
    return modes_in(decided.pipeline_recompute)


def on_rank(decided: Decisions, rank: int) -> Decisions:
    """The decisions as one rank of the pipeline follows them."""
    if decided.pipeline_recompute == ALIKE:
        return decided
    return _alike(decided, modes_of(decided)[rank])


@lru_cache(maxsize=64)
def _alike(decided: Decisions, mode: RecomputeMode) -> Decisions:
    """The decisions where all ranks recompute as one of them. A forecast asks often."""
    return replace(decided, checkpoint_activations=mode, pipeline_recompute=ALIKE)


def mean_of_blocks(decided: Decisions, figure: Callable[[Decisions], float]) -> float:
    """The mean over all blocks of a figure that depends on how a block is recomputed."""
    if decided.pipeline_recompute == ALIKE:
        return figure(decided)
    blocks, modes = blocks_of_ranks(decided), modes_of(decided)
    figures = {mode: figure(_alike(decided, mode)) for mode in dict.fromkeys(modes)}
    total = sum(num * figures[mode] for num, mode in zip(blocks, modes, strict=True))
    return total / sum(blocks)


def share_recomputed(decided: Decisions) -> float:
    """The share of all blocks whose forward runs again."""
    return mean_of_blocks(decided, lambda how: recomputed_share(how.checkpoint_activations))


def least_that(fits: Callable[[RecomputeMode], bool], most: RecomputeMode) -> RecomputeMode | None:
    """The least recompute up to `most` that fits; None where none does."""
    modes = (mode for mode in RECOMPUTE_MODES if _weight(mode) <= _weight(most))
    return next(filter(fits, modes), None)


def with_modes(decided: Decisions, modes: list[RecomputeMode]) -> Decisions:
    """The same with a way to recompute for each rank."""
    return replace(
        decided, checkpoint_activations=heaviest(modes), pipeline_recompute=in_words(modes)
    )


def _weight(mode: RecomputeMode) -> float:
    return {"none": 0.0, "selective": 1.0, "full": 3.0}[mode] if isinstance(mode, str) else 1 + mode


def _mode(word: str) -> RecomputeMode:
    if word in ("none", "selective", "full"):
        return word
    share = float(word)
    if not 0 <= share <= 1:
        raise ValueError(f"{word} is no share of the blocks")
    return share
