"""What each rank of a pipeline recomputes, and blocks that move because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.facts.flops import recomputed_share
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.plan.search import fits
from shardwise.plan.stage_balance import evened
from shardwise.plan.stage_cuts import stage_ranges
from shardwise.plan.stage_memory import memory_of_ranks
from shardwise.plan.stage_recompute import least_that, modes_of, on_rank, share_recomputed
from shardwise.plan.stage_rows import planned_ranks

LARGE = ("model.name=llama-3.1-405b", "cluster.name=64x8xH100", "precision.param=bf16")
LARGE += ("data.seq_len=8192", "mesh.pipeline=8", "mesh.tensor=8", "shard.strategy=full_shard")
SMALL = ("model.name=tiny-llama", "cluster.name=4xCPU", "data.seq_len=64", "mesh.pipeline=4")
SMALL += ("model.overrides={num_hidden_layers: 8}",)


def plan_of(*settings: str) -> Plan:
    return choose_plan(load_config(None, list(settings)), environ={})


@pytest.fixture(scope="module")
def large() -> Plan:
    return plan_of(*LARGE)


def test_ranks_with_fewer_micro_batches_under_way_recompute_less(large: Plan) -> None:
    decided, modes = large.decided, modes_of(large.decided)
    assert modes[0] == decided.checkpoint_activations == "full" and modes[-1] == "none"
    shares = [recomputed_share(mode) for mode in modes]
    assert shares == sorted(shares, reverse=True)
    memory = memory_of_ranks(large.model, large.cluster, decided)
    assert all(fits(each, large.cluster) for each in memory)
    assert large.memory == max(memory, key=lambda each: each.total)
    assert large.choices["pipeline_recompute"].source == "search"


def test_ranks_that_recompute_less_have_more_blocks(large: Plan) -> None:
    blocks = [len(stage) for stage in stage_ranges(large.decided.pipeline_blocks)]
    assert sum(blocks) == 126 and blocks[0] < 15 and blocks[-1] > 15
    assert min(rank.work for rank in planned_ranks(large)) > 0.8


def test_it_is_faster_than_ranks_that_do_alike(large: Plan) -> None:
    alike = [plan_of(*LARGE, f"memory.checkpoint_activations={mode}") for mode in (0.75, "full")]
    assert large.forecast is not None
    for plan in alike:
        assert plan.forecast is not None and plan.decided.pipeline_recompute == "-"
        assert large.forecast.tokens_per_s > 1.04 * plan.forecast.tokens_per_s


def test_what_is_given_is_done() -> None:
    plan = plan_of(*SMALL, "mesh.pipeline_recompute=full+0.5+selective+none")
    assert modes_of(plan.decided) == ["full", 0.5, "selective", "none"]
    assert plan.decided.checkpoint_activations == "full"
    assert on_rank(plan.decided, 1).checkpoint_activations == 0.5
    assert share_recomputed(plan.decided) == pytest.approx((2 + 0.5 * 2) / 8, abs=0.1)
    rows = [rank.blocks for rank in planned_ranks(plan)]
    assert "recompute 0.5" in rows[1] and "recompute none" in rows[3]


@pytest.mark.parametrize(
    ("settings", "words", "fix"),
    [
        (("mesh.pipeline_recompute=full+none",), "each of 4 ranks", "full+none+none+none"),
        (("mesh.pipeline_recompute=full+2+0+none",), "from 0 to 1", "mesh.pipeline_recompute=auto"),
        (("mesh.pipeline_recompute=a+b+c+d",), "takes 4 of none", "mesh.pipeline_recompute=auto"),
        (
            (
                "mesh.pipeline_recompute=full+full+none+none",
                "memory.checkpoint_activations=selective",
            ),
            "both say what ranks recompute",
            "leave memory.checkpoint_activations out",
        ),
        (
            ("mesh.pipeline_recompute=full+none+none+none", "mesh.pipeline_schedule=zero_bubble"),
            "recomputed in each",
            "mesh.pipeline_schedule=1f1b",
        ),
        (
            ("mesh.pipeline=1", "mesh.pipeline_recompute=full+none"),
            "mesh.pipeline is 1",
            "leave mesh.pipeline_recompute out",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused(settings: tuple[str, ...], words: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(*SMALL, *settings)
    error = caught.value
    assert words in f"{error.what} {error.why}" and fix in str(error.fix)


def test_blocks_move_from_the_fullest_rank_until_none_is_fuller(large: Plan) -> None:
    start = replace(large.decided, pipeline_blocks="15+16+16+16+16+16+16+15")
    weights = (9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    moved = evened(start, lambda rank, blocks: weights[rank] * blocks)
    blocks = [len(stage) for stage in stage_ranges(moved.pipeline_blocks)]
    assert sum(blocks) == 126 and blocks[0] == 2 and max(blocks) - min(blocks[1:]) <= 1


def test_blocks_leave_ranks_on_which_they_do_not_fit() -> None:
    wide = ("model.name=llama-3.1-8b", "cluster.name=4xH100", "precision.param=bf16")
    wide += ("model.overrides={vocab_size: 600000}", "data.seq_len=8192", "mesh.pipeline=4")
    plan = plan_of(*wide)
    blocks = plan.decided.pipeline_blocks
    assert fits(plan.memory, plan.cluster) and plan.choices["pipeline_blocks"].source == "search"
    as_long = plan_of(*wide, "mesh.pipeline_blocks=10+10+11+1")
    assert not fits(as_long.memory, as_long.cluster)
    assert plan_of(*wide, f"mesh.pipeline_blocks={blocks}").memory == plan.memory


def test_the_least_recompute_is_the_first_that_fits() -> None:
    assert least_that(lambda mode: False, "full") is None
    assert least_that(lambda mode: True, "full") == "none"
    assert least_that(lambda mode: mode != "none", "full") == "selective"
    assert least_that(lambda mode: mode in (0.5, 0.75), 0.25) is None
