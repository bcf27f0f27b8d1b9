"""Models whose blocks are divided into stages train as whole ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import (
    Settings,
    Tally,
    Trained,
    assert_close,
    run_steps,
    start,
    train_plainly,
    whole_params,
)

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 66,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "tie_word_embeddings": False,
}
LLAMA: Settings = {"model.name": "tiny-llama", "model.overrides": SHAPE}
FULL: Settings = {"shard.strategy": "full_shard"}
GRAD: Settings = {"shard.strategy": "shard_grad_op"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 1}
TURNS: Settings = {"mesh.pipeline_schedule": "interleaved_1f1b"}
ZERO: Settings = {"mesh.pipeline_schedule": "zero_bubble"}
RECOMPUTED: Settings = {"memory.checkpoint_activations": "full"}
# The ranks of a pipeline, all ranks, and the rest of a mesh and of a run.
WAYS: dict[str, tuple[int, int, Settings]] = {
    "1f1b": (2, 2, {"mesh.pipeline_blocks": "4+1"}),
    "interleaved": (2, 2, {**TURNS, **RECOMPUTED}),
    "zero bubble": (2, 2, {**ZERO, "mesh.pipeline_chunks": 2}),
    "FSDP x PP": (2, 4, {**FULL, "train.accumulation": 8, "train.micro_batch": 1}),
    "FSDP x PP, zero bubble": (2, 4, {**FULL, **ZERO}),
    "4 stages": (4, 4, {"memory.loss": "full", **RECOMPUTED}),
}
LONG_WAYS: dict[str, tuple[int, int, Settings]] = {
    "ZeRO-2 x PP": (2, 4, GRAD),
    "DDP x PP": (2, 4, {"shard.strategy": "no_shard"}),
    "ZeRO-2 x PP, interleaved": (2, 4, {**GRAD, **TURNS}),
    "FSDP x PP, interleaved": (2, 4, {**FULL, **TURNS}),
    "more micro-batches": (2, 2, {"train.accumulation": 16, "train.micro_batch": 1}),
    "zero bubble, one stage": (4, 4, ZERO),
}


@pytest.fixture(scope="module")
def whole(ranks: Pools) -> Trained:
    found: Trained = ranks(1).run(train_plainly, LLAMA)[0]
    return found


def train_in_stages(world: int, settings: Settings) -> Trained | None:
    """On every rank: all steps; what they gave comes from rank 0, with the parameters of all
    stages."""
    session = start(world, settings)
    steps = range(session.plan.config.train.steps)
    found: Any = run_steps(session, steps)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, whole_params(session.model))
    if found is None:
        return None
    return Trained(found.losses, found.norms, {k: v for each in everyone for k, v in each.items()})


@pytest.mark.parametrize("way", WAYS)
def test_stages_train_as_one_process(ranks: Pools, whole: Trained, tally: Tally, way: str) -> None:
    _check(ranks, whole, tally, *WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("way", LONG_WAYS)
def test_all_ways_train_as_one_process(
    ranks: Pools, whole: Trained, tally: Tally, way: str
) -> None:
    _check(ranks, whole, tally, *LONG_WAYS[way])


def _check(
    ranks: Pools, whole: Trained, tally: Tally, stages: int, world: int, more: Settings
) -> None:
    settings = {**LLAMA, "train.accumulation": 4, "mesh.pipeline": stages, **more}
    run = ranks(world).run(train_in_stages, world, settings)[0]
    assert_close(run, whole, tally)
