"""What a plan's page asks the planner: a step's moments, other devices, other settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.gpus import find_gpu
from shardwise.facts.models import ModelSpec
from shardwise.plan import stage_memory
from shardwise.plan.activations import Activations
from shardwise.plan.decisions import Decisions
from shardwise.plan.elsewhere import (
    _in_full_nodes,
    other_kinds,
    other_sizes,
    searched_for,
    sizes_of,
)
from shardwise.plan.grid import look_around
from shardwise.plan.joint_searches import JointSearches
from shardwise.plan.memory import estimate_with, memory_over_step
from shardwise.plan.planned import MemoryEstimate, Plan
from shardwise.plan.search import Option
from shardwise.plan.stage_memory import estimate_largest

PlanOf = Callable[..., Plan]
LLAMA = ("model.name=llama-3.1-8b", "data.source=synthetic", "data.seq_len=4096")
FULLY = (*LLAMA, "shard.strategy=full_shard")


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("train.global_batch=256", "train.micro_batch=1", "memory.accumulate=sharded"),
        ("train.global_batch=256", "train.micro_batch=1", "memory.accumulate=unsharded"),
        ("shard.strategy=hybrid_shard", "cluster.name=2x8xH100"),
        ("train.kernels=torch", "memory.compile=false"),
        ("memory.offload=cpu",),
    ],
)
def test_the_peak_is_the_largest_moment_of_a_step(
    plan_of: PlanOf, changes: tuple[str, ...]
) -> None:
    plan = plan_of(*LLAMA, "cluster.name=8xH100", *changes)
    over_step = memory_over_step(plan.model, plan.cluster, plan.decided)
    assert max(over_step.values(), key=lambda held: held.total) == plan.memory
    first, *inner, last = over_step
    assert (first, last) == ("between steps", "optimizer")
    assert {"loss", "backward of the last block"} <= set(inner)
    between, update = over_step[first], over_step[last]
    assert between.grads == 0
    assert between.total <= update.total <= plan.memory.total
    # What the optimizer reads is there, in the allocator's pool where replicas are summed.
    shards = 0 if plan.decided.offload else plan.memory.params
    assert update.grads + (update.allocator if plan.decided.replicate > 1 else 0) >= shards


def test_other_sizes_are_what_plans_for_these_clusters_say(plan_of: PlanOf) -> None:
    plan = plan_of(*FULLY, "cluster.name=8xH100")
    sizes = other_sizes(JointSearches(plan))
    assert [each.cluster.world_size for each in sizes] == [1, 2, 4, 8, 16, 32, 64]
    assert sizes[0].option is None and "does not fit" in sizes[0].why_not
    own, twice = (each for each in sizes if each.cluster.world_size in (8, 16))
    assert own.forecast == plan.forecast
    assert twice.forecast == plan_of(*FULLY, "cluster.name=2x8xH100").forecast


def test_a_batch_that_does_not_divide_is_the_reason_and_no_error(plan_of: PlanOf) -> None:
    plan = plan_of(*FULLY, "cluster.name=8xH100", "train.global_batch=8")
    why = {each.cluster.world_size: each.why_not for each in other_sizes(JointSearches(plan))}
    assert why[16] == "train.global_batch=8 does not divide over 16 ranks"
    assert why[8] == ""


def test_other_kinds_are_what_plans_for_them_say(plan_of: PlanOf) -> None:
    given = ("cluster.usd_per_gpu_hour=2", "cluster.peak_tflops=900")
    plan = plan_of(*FULLY, "cluster.name=8xH100", *given)
    own, *others = other_kinds(JointSearches(plan))
    assert own.forecast == plan.forecast
    names = [each.cluster.device_name for each in others]
    assert {"A100-80GB", "H200", "B200", "GB200", "MI300X"} <= set(names)
    assert not {"H100", "V100-32GB", "L4"} & set(names)
    h200 = next(each for each in others if each.cluster.device_name == "H200")
    # The price and the peak that were given are the H100's.
    assert h200.forecast == plan_of(*FULLY, "cluster.name=8xH200").forecast


@pytest.mark.parametrize(
    ("count", "kind", "name"),
    [
        (64, "H100", "8x8xH100"),
        (64, "GB200", "16x4xGB200"),
        (2, "H200", "2xH200"),
        (18, "H100", "3x6xH100"),
        (17, "H100", None),
        (8, "H200", "8xH200"),
    ],
)
def test_gpus_of_another_kind_stand_in_nodes_as_they_are_sold(
    count: int, kind: str, name: str | None
) -> None:
    assert _in_full_nodes(count, find_gpu(kind)) == name


def test_parts_of_a_cluster_keep_its_nodes_and_their_links(plan_of: PlanOf) -> None:
    linked = ("cluster.name=16xH100", "cluster.nvlink_domain=16")
    found = list(sizes_of(plan_of(*FULLY, *linked), (1 / 4, 1 / 2, 1, 2)))
    assert [each.name for each in found] == ["4xH100", "8xH100", "16xH100", "2x16xH100"]
    assert [each.nvlink_domain for each in found] == [4, 8, 16, 16]


def test_the_grid_holds_the_plan_and_settings_that_only_a_user_gives(plan_of: PlanOf) -> None:
    given = ("train.micro_batch=7", "memory.checkpoint_activations=0.3", "data.seq_len=2048")
    plan = plan_of(*FULLY, "cluster.name=8xH100", *given)
    grid = look_around(JointSearches(plan))
    assert 7 in grid.micro_batches and 0.3 in grid.recompute
    sizes = (len(grid.seq_lens), len(grid.recompute), len(grid.micro_batches))
    place = [cluster.world_size for cluster in grid.clusters].index(8)
    for size, number in zip(
        sizes,
        (grid.seq_lens.index(2048), grid.recompute.index(0.3), grid.micro_batches.index(7)),
        strict=True,
    ):
        place = place * size + number
    own = grid.spots[place]
    assert isinstance(own, Option)
    assert (own.memory, own.forecast) == (plan.memory, plan.forecast)


def test_sequences_stay_within_the_positions_of_a_model(plan_of: PlanOf) -> None:
    plan = plan_of("model.name=gpt2", "data.seq_len=512", "cluster.name=1xA100")
    limited = replace(plan, model=replace(plan.model, max_positions=1024))
    assert look_around(JointSearches(limited)).seq_lens == (128, 256, 512, 1024)


def test_a_survey_finds_the_plan_again(plan_of: PlanOf) -> None:
    plan = plan_of(*LLAMA, "cluster.name=8xH100")
    searched = searched_for(JointSearches(plan))
    assert searched.best.memory == plan.memory
    assert searched.best.forecast == plan.forecast


STAGES = (*LLAMA, "cluster.name=8xH100", "mesh.pipeline=4", "data.seq_len=16384")


def test_what_a_survey_knows_is_what_one_estimate_says(plan_of: PlanOf) -> None:
    plan = plan_of(*STAGES)
    for option in searched_for(JointSearches(plan)).options:
        memory = estimate_largest(plan.model, plan.cluster, option.decided)
        assert option.memory == memory, option.label


def test_searches_around_a_plan_estimate_nothing_twice(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = JointSearches(plan_of(*STAGES))
    asked: Counter[tuple[int, int, int, Decisions]] = Counter()

    def count(
        blocks: Activations, part: ModelSpec, cluster: ClusterSpec, own: Decisions
    ) -> MemoryEstimate:
        asked[part.num_layers, part.vocab_size, part.embedding_params, own] += 1
        return estimate_with(blocks, part, cluster, own)

    monkeypatch.setattr(stage_memory, "estimate_with", count)
    searched = searched_for(searches)
    assert set(asked.values()) == {1}
    own = asked.total()
    # Four ranks of each option, some of its neighbours, and ranks that recompute less.
    assert own < 6 * len(searched.options)
    assert searched_for(searches).options == searched.options
    assert asked.total() == own
    other_kinds(searches)
    # GPUs of other kinds hold more or less, and so other forms fit on them.
    assert set(asked.values()) == {1}
    assert asked.total() < 2 * own


def test_sites_wait_for_each_other_wherever_the_run_is(plan_of: PlanOf) -> None:
    sites = ("cluster.name=2x8xH100", "cluster.datacenters=2", "cluster.site_link=1")
    plan = plan_of(*FULLY, *sites)
    assert plan.forecast is not None and plan.forecast.terms["between_sites"] > 0
    assert searched_for(JointSearches(plan)).best.forecast == plan.forecast
    own = next(each for each in other_sizes(JointSearches(plan)) if each.cluster == plan.cluster)
    assert own.forecast == plan.forecast
    found = [spot for spot in look_around(JointSearches(plan)).spots if isinstance(spot, Option)]
    assert plan.forecast in [spot.forecast for spot in found]
