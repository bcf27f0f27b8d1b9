"""Models whose blocks are divided into stages train as whole ones do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from family_runs import HEADER, Compared, compare
from gradient_runs import assert_gradients
from rank_pool import Ranks
from tiny_runs import (
    Settings,
    Tally,
    Trained,
    assert_close,
    start,
    tiny_plan,
    train,
    train_plainly,
)
from torch.distributed.pipelining import PipelineStage

from pipeline_bubble import PIECES, counted
from shardwise.parallel.dispatch import AllToAll
from shardwise.parallel.stages import stages_of
from shardwise.plan.pipeline_rules import FAMILIES
from shardwise.plan.schedule import Kind, StageWork
from shardwise.plan.stage_rows import in_blocks
from shardwise.plan.tensor_suits import FAMILIES as DIVIDED_FAMILIES
from shardwise.training.pipeline import StagePasses
from shardwise.training.session import build_loader
from shardwise.training.stopwatch import Stopwatch

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
# In the order of PIECES.
KINDS = get_args(Kind)
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
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
TURNS: Settings = {"mesh.pipeline_schedule": "interleaved_1f1b"}
ZERO: Settings = {"mesh.pipeline_schedule": "zero_bubble"}
DIVIDED: Settings = {"mesh.tensor": 2}
RECOMPUTED: Settings = {"memory.checkpoint_activations": "full"}
# The ranks of a pipeline, all ranks, and the rest of a mesh and of a run.
WAYS: dict[str, tuple[int, int, Settings]] = {
    "1f1b": (2, 2, {"mesh.pipeline_blocks": "4+1", "mesh.pipeline_recompute": "0.5+none"}),
    "interleaved": (2, 2, {**TURNS, **RECOMPUTED}),
    "zero bubble": (2, 2, {**ZERO, "mesh.pipeline_chunks": 2}),
    "FSDP x PP": (2, 4, {**FULL, "memory.accumulate": "sharded"}),
    "FSDP x PP, zero bubble": (2, 4, {**FULL, **ZERO}),
    "4 stages": (4, 4, {"memory.loss": "full", **RECOMPUTED}),
}
# Windows in every other block, norms of heads, experts.
SAMPLE = ("qwen3", "gemma3_text", "mixtral")
FAMILY: Settings = {"mesh.pipeline": 2, "train.micro_batch": 1}
LONG_WAYS: dict[str, tuple[int, int, Settings]] = {
    "FSDP x PP, reduced once": (2, 4, {**FULL, "memory.accumulate": "unsharded"}),
    "ZeRO-2 x PP": (2, 4, {**GRAD, "memory.accumulate": "unsharded"}),
    "HSDP x PP": (2, 8, {**HYBRID, "mesh.shard": 2, "train.accumulation": 2}),
    "HSDP x PP, reduced each time": (
        2,
        8,
        {**HYBRID, "mesh.shard": 2, "train.accumulation": 2} | {"memory.accumulate": "sharded"},
    ),
    "ZeRO-2 x PP, reduced each time": (2, 4, {**GRAD, "memory.accumulate": "sharded"}),
    "DDP x PP": (2, 4, {"shard.strategy": "no_shard", "memory.accumulate": "sharded"}),
    "ZeRO-2 x PP, interleaved": (2, 4, {**GRAD, **TURNS}),
    "FSDP x PP, interleaved": (2, 4, {**FULL, **TURNS}),
    "more micro-batches": (2, 2, {"train.accumulation": 16, "train.micro_batch": 1}),
    "zero bubble, one stage": (4, 4, ZERO),
    "TP x PP": (2, 4, {**DIVIDED, "mesh.pipeline_blocks": "2+3", **RECOMPUTED}),
    "TP x PP, interleaved": (2, 4, {**DIVIDED, **TURNS, "memory.loss": "full"}),
    "TP x PP, zero bubble": (2, 4, {**DIVIDED, **ZERO}),
    "TP without SP x PP": (2, 4, {**DIVIDED, "mesh.sequence_parallel": False}),
    "TP x 4 stages": (4, 8, {**DIVIDED, **RECOMPUTED}),
    "FSDP x TP x PP": (2, 8, {**DIVIDED, **FULL, "memory.accumulate": "sharded"}),
    "FSDP x TP x PP, interleaved": (2, 8, {**DIVIDED, **FULL, **TURNS}),
    "FSDP x TP x PP, zero bubble": (2, 8, {**DIVIDED, **FULL, **ZERO}),
    "DDP x TP x PP": (2, 8, {**DIVIDED, "shard.strategy": "no_shard"}),
}
# Gradients are longer than that, so the table must count once.
TIED: Settings = {
    **{"model.name": "tiny-llama", "optim.clip_norm": 0.5},
    "model.overrides": {**SHAPE, "tie_word_embeddings": True},
}
TIED_WAYS: dict[str, tuple[int, int, Settings]] = {
    "two stages": (2, 2, {}),
    "FSDP, four stages": (4, 8, {**FULL, "memory.accumulate": "sharded"}),
    "FSDP, interleaved": (2, 4, {**FULL, **TURNS}),
    "FSDP x TP, zero bubble": (2, 8, {**FULL, **DIVIDED, **ZERO}),
    "HSDP": (2, 8, {**HYBRID, "mesh.shard": 2, "train.accumulation": 2}),
    "all logits at once": (2, 4, {**DIVIDED, "memory.loss": "full"}),
}
# All ranks, and the rest of a mesh and of a run.
COMPILED: dict[str, tuple[int, Settings]] = {
    "FSDP, 1f1b": (4, {**FULL, "memory.checkpoint_activations": "selective"}),
    "interleaved": (2, {**TURNS, **RECOMPUTED}),
    "TP": (4, DIVIDED),
}
GRADIENTS: dict[str, tuple[int, Settings]] = {
    "TP x PP": (4, DIVIDED),
    "TP x PP, interleaved": (4, {**DIVIDED, **TURNS}),
    "TP x PP, zero bubble": (4, {**DIVIDED, **ZERO}),
    "FSDP x TP x PP": (8, {**DIVIDED, **FULL}),
    "HSDP x PP, interleaved": (8, {**HYBRID, "mesh.shard": 2, **TURNS}),
}


# Experts on other ranks of a stage.
MIXTURE: Settings = {
    "model.name": "tiny-mixtral",
    "model.overrides": {**SHAPE, "intermediate_size": 72, "num_local_experts": 4},
}
DEALT: Settings = {"mesh.expert": 2}
MIXTURE_WAYS: dict[str, tuple[int, int, Settings]] = {
    "EP x PP": (2, 4, {**DEALT, "mesh.shard": 2, **RECOMPUTED}),
    "EP x PP, interleaved": (2, 4, {**DEALT, "mesh.shard": 2, **TURNS}),
    "FSDP x EP x PP": (2, 8, {**DEALT, "mesh.shard": 4, "memory.accumulate": "sharded"}),
    "EP x PP, zero bubble": (2, 4, {**DEALT, "mesh.shard": 2, **ZERO}),
    "TP x EP x PP, zero bubble": (2, 8, {"mesh.expert": 4, **DIVIDED, "mesh.shard": 2, **ZERO}),
    "HSDP x EP x PP": (2, 8, {**DEALT, **HYBRID, "mesh.shard": 2, "train.accumulation": 2}),
    "TP x EP x PP": (2, 8, {"mesh.expert": 4, **DIVIDED, "mesh.shard": 2}),
}
SHARED: Settings = {"mesh.pipeline": 2, "mesh.shard": 2, "train.accumulation": 2}
OTHER_MIXTURE_WAYS = [way for way in MIXTURE_WAYS if way != "EP x PP"]


@pytest.fixture(scope="module")
def whole(ranks: Pools) -> Trained:
    found: Trained = ranks(1).run(train_plainly, LLAMA)[0]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_stages_train_as_one_process(ranks: Pools, whole: Trained, tally: Tally, way: str) -> None:
    _check(ranks, whole, tally, *WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("way", LONG_WAYS)
def test_all_ways_train_as_one_process(
    ranks: Pools, whole: Trained, tally: Tally, way: str
) -> None:
    _check(ranks, whole, tally, *LONG_WAYS[way])


@pytest.mark.parametrize(
    "way", ["EP x PP", *(pytest.param(way, marks=pytest.mark.long) for way in OTHER_MIXTURE_WAYS)]
)
def test_experts_may_be_dealt_out_inside_a_stage(ranks: Pools, tally: Tally, way: str) -> None:
    reference = ranks(1).run(train_plainly, MIXTURE)[0]
    stages, world, more = MIXTURE_WAYS[way]
    _check(ranks, reference, tally, stages, world, {**MIXTURE, **more})


def exchanges(schedule: str) -> int:
    """On every rank: how often rows begin to travel to experts or back in a step."""
    session = start(4, {**MIXTURE, **DEALT, "mesh.pipeline_schedule": schedule} | SHARED)
    stages = stages_of(session.plan, session.mesh)
    assert stages is not None
    passes = StagePasses(session.model, session.plan, stages, lambda phase: None)
    with patch.object(AllToAll, "start", autospec=True, side_effect=AllToAll.start) as begun:
        passes.forward_backward(build_loader(session).step_batches(0), torch.ones(()), 1.0)
    return int(begun.call_count)


def test_rows_travel_once_where_backward_has_two_parts(ranks: Pools) -> None:
    whole, in_two = (ranks(4).run(exchanges, name) for name in ("1f1b", "zero_bubble"))
    assert whole == in_two and min(whole) > 0


@pytest.fixture(scope="module")
def whole_and_tied(ranks: Pools) -> Trained:
    found: Trained = ranks(1).run(train_plainly, TIED)[0]
    return found


@pytest.mark.long
@pytest.mark.parametrize("way", TIED_WAYS)
def test_a_table_may_be_in_two_stages(
    ranks: Pools, whole_and_tied: Trained, tally: Tally, way: str
) -> None:
    stages, world, more = TIED_WAYS[way]
    _check(ranks, whole_and_tied, tally, stages, world, {**TIED, **more})


@pytest.mark.long
@pytest.mark.parametrize("state", [{"optim.state": "int8"}, {"optim.decay_embeddings": False}])
def test_both_copies_of_a_table_stay_equal(ranks: Pools, state: Settings) -> None:
    """`whole_params` finds them unequal otherwise."""
    wide = {**SHAPE, "hidden_size": 64, "tie_word_embeddings": True}
    stages = {"train.accumulation": 4, "mesh.pipeline": 2, **FULL}
    settings = {**LLAMA, "model.overrides": wide, **stages, **state}
    assert ranks(4).run(train, 4, settings)[0] is not None


@pytest.mark.long
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_stages_train_as_one_process(
    ranks: Pools, whole: Trained, tally: Tally, way: str
) -> None:
    world, more = COMPILED[way]
    _check(ranks, whole, tally, 2, world, {"memory.compile": True, **more})


def _check(
    ranks: Pools, whole: Trained, tally: Tally, stages: int, world: int, more: Settings
) -> None:
    settings = {**LLAMA, "train.accumulation": 4, "mesh.pipeline": stages, **more}
    run = ranks(world).run(train, world, settings)[0]
    assert_close(run, whole, tally)


class Watched(Stopwatch):
    """A stopwatch that has seen pieces of these seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def take_s(self) -> list[float]:
        """The pieces that were given."""
        return self.seconds


def waited(steps_s: list[list[float]], busy_s: list[list[float]]) -> tuple[float, list[float]]:
    """On every rank: the share of two steps in which ranks wait, if they were as long on each and
    it was busy for so long, and the mean time for which each was busy."""
    session = start(2, {**LLAMA, "train.accumulation": 2, "mesh.pipeline": 2})
    stages = stages_of(session.plan, session.mesh)
    assert stages is not None
    passes = StagePasses(session.model, session.plan, stages, lambda phase: None)
    passes.whole, passes.busy = Watched(steps_s[stages.rank]), Watched(busy_s[stages.rank])
    figures = passes.figures()
    assert all(rank.allocated > 0 for rank in figures.ranks)
    return figures.bubble, [rank.busy_s for rank in figures.ranks]


def test_a_rank_that_has_done_its_part_waits_for_the_last_backward_of_any(ranks: Pools) -> None:
    # The longer rank needs 4 seconds for each step, and both together are busy for 10 of 16.
    steps, busy = [[4.0, 3.0], [2.0, 4.0]], [[3.0, 3.0], [1.0, 3.0]]
    for bubble, by_rank in ranks(2).run(waited, steps, busy):
        assert bubble == pytest.approx(1 - 10 / 16)
        assert by_rank == pytest.approx([3.0, 2.0])


def flops_of_pieces(settings: Settings) -> dict[tuple[str, int], int]:
    """On every rank: the FLOPs that PyTorch counts in what its stages do for the first
    micro-batch."""
    session = start(2, settings)
    stages = stages_of(session.plan, session.mesh)
    assert stages is not None
    passes = StagePasses(session.model, session.plan, stages, lambda phase: None)
    found: dict[tuple[str, int], int] = {}

    def note(name: str, stage: PipelineStage, flops: int, started: float) -> None:
        found.setdefault((name, stage.stage_index), flops)

    with ExitStack() as patches:
        for name in PIECES:
            patches.enter_context(patch.object(PipelineStage, name, counted(name, note)))
        batches = build_loader(session).step_batches(0)
        passes.forward_backward(batches, torch.ones(()), 1.0)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_stages_do_what_the_plan_counts(ranks: Pools, schedule: str) -> None:
    shape = {**SHAPE, "hidden_size": 128, "num_hidden_layers": 4}
    settings: Settings = {
        "model.overrides": shape,
        "data.seq_len": 4,
        "train.accumulation": 2,
        "mesh.pipeline": 2,
        "mesh.pipeline_schedule": schedule,
    }
    plan = tiny_plan(2, settings)
    pipeline, found = in_blocks(plan), ranks(2).run(flops_of_pieces, settings)
    pieces = {name: flops for rank in found for name, flops in rank.items()}
    assert len(pieces) == pipeline.num_stages * (3 if schedule == "zero_bubble" else 2)
    one_block = pieces["forward_one_chunk", 0] / pipeline.forward[0]
    for (name, stage), flops in pieces.items():
        planned = pipeline.seconds(StageWork(KINDS[PIECES.index(name)], stage, 0))
        assert flops / one_block == pytest.approx(planned, rel=0.03), (name, stage)


def test_each_rank_recomputes_what_the_plan_says(ranks: Pools) -> None:
    settings: Settings = {
        "model.overrides": {**SHAPE, "num_hidden_layers": 4},
        "train.accumulation": 2,
        "mesh.pipeline": 2,
        "mesh.pipeline_recompute": "full+none",
    }
    first, last = ranks(2).run(flops_of_pieces, settings)
    forward, backward = first["forward_one_chunk", 0], first["backward_one_chunk", 0]
    # A recomputation ends before a block's last matmul.
    assert 2.6 < backward / forward < 3
    assert last["backward_one_chunk", 1] < 2.1 * last["forward_one_chunk", 1]


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_trains_as_plain_pytorch_trains_it(
    family: str, ranks: Pools, tmp_path: Path
) -> None:
    _assert_equal(compare(ranks(4), family, tmp_path, FAMILY, _as_it_is))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("more", [TURNS, ZERO], ids=["interleaved", "zero bubble"])
def test_families_in_other_orders(
    family: str, more: Settings, is_tied: bool, ranks: Pools, tmp_path: Path
) -> None:
    def change(config: Any) -> None:
        _four_blocks(config)
        config.tie_word_embeddings = is_tied

    settings = {**FAMILY, "shard.strategy": "auto", **more}
    _assert_equal(compare(ranks(2), family, tmp_path, settings, change))


@pytest.mark.long
@pytest.mark.parametrize("family", [each for each in FAMILIES if each in DIVIDED_FAMILIES])
@pytest.mark.parametrize("way", GRADIENTS)
def test_each_gradient_is_that_of_one_process(
    family: str, way: str, ranks: Pools, tmp_path: Path
) -> None:
    world, more = GRADIENTS[way]
    assert_gradients(ranks, family, (world, {**FAMILY, **more}), tmp_path, _four_blocks)


def _as_it_is(config: Any) -> None:
    """Stages cannot compute the losses of routers."""


def _four_blocks(config: Any) -> None:
    """Enough for two stages on each of two ranks."""
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[place % 2] for place in range(4)]
    if hasattr(config, "no_rope_layers"):
        config.no_rope_layers = [1, 0, 1, 0]


def _assert_equal(found: Compared) -> None:
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"
