"""Which runs can have stages, how blocks are divided over them, and how long ranks wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.plan.explain import forecast_rows
from shardwise.plan.pipeline_rules import REFUSED
from shardwise.plan.planned import Plan
from shardwise.plan.schedule import (
    Kind,
    Pipeline,
    StageWork,
    most_in_flight,
    seconds_of_step,
    slots_of,
    work_of,
)
from shardwise.plan.stage_cuts import balanced_blocks, sent_bytes, stage_ranges
from shardwise.plan.stage_memory import largest_over_step, memory_of_ranks, part_of_rank
from shardwise.units import format_bytes

UNTIED = "model.overrides={num_hidden_layers: 8, tie_word_embeddings: false}"
STAGES = ("model.name=tiny-llama", "cluster.name=4xCPU", "data.seq_len=64", "mesh.pipeline=2")
FILE = ("data.source=jsonl", "data.path=x.jsonl")
GROUPED = ("data.packing=one", "data.group_lengths=true", "memory.compile=false")
GPUS = ("cluster.name=8xH100", "precision.param=auto")
NAMES: dict[str, Kind] = {"F": "forward", "I": "backward", "B": "backward", "W": "weights"}


def plan_of(*settings: str) -> Plan:
    return choose_plan(load_config(None, [*STAGES, UNTIED, *settings]), environ={})


CASES = [
    (("mesh.context=2",), "also share a `context` axis", "write mesh.context=1"),
    (("mesh.site=2",), "mesh.pipeline with 2 sites", "write mesh.pipeline=1"),
    (("model.name=tiny-gpt2",), "how to cut gpt2 models", "write mesh.pipeline=1"),
    (
        ("model.overrides={attention_dropout: 0.1, tie_word_embeddings: false}",),
        "would drop other values",
        "write model.overrides.attention_dropout=0.0",
    ),
    (("adapter.method=lora",), "adapters in stages", "leave adapter.method out"),
    (
        ("data.format=pairs", "preference.objective=dpo", *FILE),
        "losses of whole answers",
        "leave preference.objective out",
    ),
    (
        ("data.format=auto", *GROUPED, *FILE),
        "hidden states of one shape",
        "leave data.group_lengths out",
    ),
    (("memory.offload=cpu",), "host memory were not tried", "leave memory.offload out"),
    (("optim.name=muon",), "updates of whole matrices", "leave optim.name out"),
    (
        ("launch.elastic=true", "train.global_batch=8", "cluster.name=4x1xCPU"),
        "a start on fewer nodes",
        "leave launch.elastic out",
    ),
    ((*GPUS, "precision.param=fp16"), "a loss scale that falls", "leave precision.param out"),
    ((*GPUS, "precision.linear=float8"), "scales of float8", "leave precision.linear out"),
    ((*GPUS, "precision.experts=float8"), "scales of float8", "leave precision.experts out"),
    ((*GPUS, "memory.offload_activations=0.5"), "each block copies out one", "leave memory"),
    ((*GPUS, "memory.offload_optimizer=true"), "an optimizer in host memory", "leave memory"),
    (("shard.gather_in_place=true",), "between two gathers", "leave shard.gather_in_place out"),
    (("shard.unit_min_params=9",), "the model's own list", "leave shard.unit_min_params out"),
    (("shard.unit_classes=[LlamaMLP]",), "the model's own list", "leave shard.unit_classes out"),
    (
        ("model.name=tiny-mixtral", "train.router_z_loss=0.1"),
        "losses of routers",
        "leave train.router_z_loss out",
    ),
    (
        ("model.name=tiny-mixtral", "train.router_aux_loss=0.1"),
        "losses of routers",
        "write train.router_aux_loss=off",
    ),
    (("mesh.pipeline_chunks=2",), "has one stage on each rank", "write mesh.pipeline_chunks=1"),
    (("mesh.pipeline=4", "train.accumulation=3"), "at least 4", "train.accumulation=4"),
    (
        ("train.accumulation=3", "mesh.pipeline_schedule=zero_bubble"),
        "a multiple of 2",
        "train.accumulation=4",
    ),
    (("train.global_batch=2", "train.micro_batch=1"), "at least 2", "train.global_batch=auto"),
    (("mesh.pipeline_blocks=4+3",), "whose sum is the 8 blocks", "mesh.pipeline_blocks=4+4"),
    (("mesh.pipeline_blocks=8+x",), "takes 2 numbers", "mesh.pipeline_blocks=4+4"),
    (
        ("mesh.pipeline=4", "mesh.pipeline_schedule=interleaved_1f1b", "mesh.pipeline_chunks=3"),
        "12 stages need one each",
        "write mesh.pipeline=1",
    ),
    (("mesh.pipeline=3",), "the product of the axes", "mesh.pipeline=2"),
    (("mesh.pipeline=1", "mesh.pipeline_blocks=4+4"), "mesh.pipeline is 1", "write mesh.pipeline"),
    *(
        (("mesh.pipeline_schedule=zero_bubble", setting), words, "mesh.pipeline_schedule=1f1b")
        for setting, words in (
            ("memory.checkpoint_activations=full", "recomputed in each"),
            ("shard.reshard_after_forward=true", "still gathered"),
            ("memory.accumulate=sharded", "until the last micro-batch"),
            ("memory.compile=true", "a compiled block has one"),
        )
    ),
]


@pytest.mark.parametrize(("settings", "words", "fix"), CASES, ids=lambda case: str(case)[:60])
def test_what_does_not_suit_stages_is_refused(
    settings: tuple[str, ...], words: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(*settings)
    error = caught.value
    assert words in f"{error.what} {error.why}"
    assert fix in str(error.fix)


def test_every_refused_setting_has_a_case() -> None:
    named = " ".join(setting for settings, _, _ in CASES for setting in settings)
    for refused in REFUSED:
        assert refused.path in named, refused


@pytest.mark.parametrize(
    ("blocks", "stages", "head", "expected"),
    [
        (8, 2, 0.0, (4, 4)),
        (8, 2, 2.0, (5, 3)),
        (5, 2, 1.0, (3, 2)),
        (5, 4, 1.0, (1, 1, 2, 1)),
        (32, 4, 1.2, (8, 8, 9, 7)),
        (4, 4, 30.0, (1, 1, 1, 1)),
        (126, 8, 0.6, (15, 16, 16, 16, 16, 16, 16, 15)),
    ],
)
def test_stages_take_about_as_long(
    blocks: int, stages: int, head: float, expected: tuple[int, ...]
) -> None:
    assert balanced_blocks(blocks, stages, head) == expected
    assert sum(expected) == blocks


SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": lambda stages, num: Schedule1F1B(stages[0], num),
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("ranks", "chunks", "passes"),
    [(2, 1, 2), (4, 1, 8), (2, 2, 4), (4, 2, 8), (3, 2, 9), (4, 3, 4)],
)
def test_ranks_work_in_the_order_of_pytorch(
    name: str, ranks: int, chunks: int, passes: int
) -> None:
    if name == "1f1b" and chunks > 1:
        return
    count = ranks * chunks
    stages: Any = [
        SimpleNamespace(
            stage_index=place, num_stages=count, group_rank=0, group_size=ranks, submod=None
        )
        for place in range(0, count, ranks)
    ]
    theirs = SCHEDULES[name](stages, passes).pipeline_order
    pipeline = Pipeline(name, ranks, passes, (1.0,) * count, (2.0,) * count)
    # PyTorch's picture of 1F1B counts the last rank's forwards from 1. It runs them from 0.
    for rank in range(ranks - (name == "1f1b")):
        slots = [each and in_words(each) for each in theirs[rank] if "REDUCE" not in str(each)]
        assert work_of(pipeline, rank) == [each for each in slots if each]
        if name == "interleaved_1f1b":
            assert slots_of(pipeline, rank) == slots


def in_words(action: Any) -> StageWork:
    """An action of PyTorch's, such as 3F0."""
    stage, letter, batch = re.fullmatch(r"(\d+)([FIBW])(\d+)", str(action)).groups()  # type: ignore[union-attr]
    return StageWork(NAMES[letter], int(stage), int(batch))


def test_ranks_that_meet_in_every_slot_wait_for_longer() -> None:
    def step(name: str, **how: Any) -> float:
        return seconds_of_step(Pipeline(name, 2, 2, (1.0,) * 4, (2.0,) * 4, **how))

    # Rank 1 could begin with the last stage after three forwards of rank 0. In its slot it receives
    # the fourth first.
    assert step("interleaved_1f1b") == pytest.approx(15)
    assert step("interleaved_1f1b", in_slots=True) == pytest.approx(16)
    assert step("zero_bubble", in_slots=True) == step("zero_bubble")


def test_ranks_wait_as_the_formulas_say() -> None:
    def waiting(name: str, ranks: int, chunks: int, passes: int) -> float:
        one = (1.0 / chunks,) * (ranks * chunks)
        pipeline = Pipeline(name, ranks, passes, one, tuple(2 * each for each in one))
        return seconds_of_step(pipeline) - pipeline.busy(0)

    assert waiting("1f1b", 4, 1, 8) == pytest.approx(3 * 3)
    assert waiting("interleaved_1f1b", 4, 2, 8) == pytest.approx(3 * 3 / 2)
    assert waiting("zero_bubble", 4, 1, 8) == pytest.approx(3)
    slow = Pipeline("1f1b", 2, 4, (1.0, 2.0), (2.0, 4.0), send=0.5)
    assert seconds_of_step(slow) == pytest.approx(1 + 0.5 + 4 * 6 + 0.5 + 2)


def test_rounds_are_equal_where_ranks_do_not_divide_the_micro_batches() -> None:
    pipeline = Pipeline("interleaved_1f1b", 4, 9, (1.0,) * 8, (2.0,) * 8)
    for rank in range(4):
        assert len(set(work_of(pipeline, rank))) == 2 * 2 * 9
    assert seconds_of_step(pipeline) >= 2 * 9 * 3


def test_the_first_stage_keeps_the_most_micro_batches() -> None:
    pipeline = Pipeline("1f1b", 4, 8, (1.0,) * 4, (2.0,) * 4)
    assert [most_in_flight(pipeline, rank) for rank in range(4)] == [4, 3, 2, 1]


def test_a_plan_divides_ranks_blocks_and_batches() -> None:
    plan = plan_of("mesh.pipeline_schedule=interleaved_1f1b")
    decided = plan.decided
    assert (decided.pipeline, decided.pipeline_chunks, decided.data_ranks) == (2, 2, 2)
    assert sum(map(len, stage_ranges(decided.pipeline_blocks))) == 8
    assert decided.accumulation == 8 and decided.world_size == 4
    assert plan.choices["pipeline"].source == "user"
    rows = dict(forecast_rows(plan))
    assert "embedding" in rows["stage 0"] and "head and loss" in rows["stage 1"]
    assert "16 micro-batches" not in rows["bubble"] and "interleaved_1f1b" in rows["bubble"]


def test_each_rank_has_its_part_of_the_model() -> None:
    plan = plan_of("mesh.pipeline=4", "mesh.pipeline_blocks=1+2+2+3")
    parts = [part_of_rank(plan.model, plan.decided, rank) for rank in range(4)]
    assert [part.num_layers for part in parts] == [1, 2, 2, 3]
    assert sum(part.total_params for part in parts) == plan.model.total_params
    memory = memory_of_ranks(plan.model, plan.cluster, plan.decided)
    assert plan.memory == max(memory, key=lambda each: each.total)
    over_step = largest_over_step(plan.model, plan.cluster, plan.decided)
    assert max(each.total for each in over_step.values()) == plan.memory.total


def test_the_first_and_the_last_rank_have_a_tied_table() -> None:
    plan = plan_of("mesh.pipeline=4", "model.overrides.tie_word_embeddings=true")
    assert plan.model.tied_embeddings
    parts = [part_of_rank(plan.model, plan.decided, rank) for rank in range(4)]
    table = plan.model.embedding_params
    assert sum(part.total_params for part in parts) == plan.model.total_params + table
    assert [part.embedding_params for part in parts] == [table, 0, 0, 0]


def test_a_plan_for_gpus_forecasts_the_bubble() -> None:
    model = "model.name=llama-3.1-70b"
    settings = ("cluster.name=4x8xH100", "precision.param=bf16", model, "model.overrides={}")
    plan = plan_of(*settings, "mesh.pipeline=4", "train.accumulation=16", "data.seq_len=4096")
    assert plan.forecast is not None
    share = plan.forecast.terms["bubble"] / plan.forecast.step_s
    assert share == pytest.approx(3 / (16 + 3), abs=0.03)
    assert any("has not run on GPUs yet" in warning for warning in plan.warnings)
    assert plan.decided.compile is True
    split = plan_of(*settings, "mesh.pipeline=4", "mesh.pipeline_schedule=zero_bubble")
    assert split.decided.compile is False


LARGE = ("model.name=llama-3.1-405b", "model.overrides={}", "cluster.name=64x8xH100")
LARGE += ("precision.param=bf16", "data.seq_len=8192", "mesh.pipeline=8")


def test_ranks_of_a_stage_may_divide_its_blocks() -> None:
    plan = plan_of(*LARGE, "mesh.tensor=8", "train.accumulation=16")
    decided = plan.decided
    assert (decided.pipeline, decided.tensor, decided.data_ranks) == (8, 8, 8)
    assert plan.memory.high < plan.cluster.memory_bytes
    assert plan.forecast is not None
    share = plan.forecast.terms["bubble"] / plan.forecast.step_s
    assert share == pytest.approx(7 / (16 + 7), abs=0.03)
    own = format_bytes(4 * plan.model.total_params / (8 * 8))
    assert plan.choices["accumulate"].why.startswith(f"{own} of whole gradients")


def test_ranks_that_divide_tokens_send_a_part_each() -> None:
    plan = plan_of("mesh.tensor=2")
    whole = replace(plan.decided, tensor=1, sequence_parallel=False)
    assert 2 * sent_bytes(plan.model, plan.decided) == sent_bytes(plan.model, whole)
    alike = replace(plan.decided, sequence_parallel=False)
    assert sent_bytes(plan.model, alike) == sent_bytes(plan.model, whole)
    # A stage sends what its last unit gives.
    narrow = replace(plan.decided, output_dtype="bf16")
    assert plan.decided.param_dtype == "fp32"
    assert 2 * sent_bytes(plan.model, narrow) == sent_bytes(plan.model, plan.decided)


def test_a_tensor_axis_is_looked_at_where_stages_are_given() -> None:
    plan = plan_of(*GPUS, "model.name=llama-3.1-8b", "model.overrides={}", "data.seq_len=4096")
    assert plan.decided.tensor == 1
    assert any("pipeline 2, tensor 2" in each.label for each in plan.alternatives)
