"""What sites exchange, as a plan foresees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.errors import UserError
from shardwise.plan.exchange_bytes import exchange_bytes
from shardwise.plan.explain import forecast_rows
from shardwise.plan.memory import estimate_memory
from shardwise.plan.planned import Plan

PlanOf = Callable[..., Plan]
EIGHT = ("model.name=llama-3.1-8b", "data.seq_len=4096", "cluster.name=4x8xH100")
PARAMS = 8_030_261_248


def test_datacenters_are_joined_by_diloco_and_the_reason_has_figures(plan_of: PlanOf) -> None:
    plan = plan_of(*EIGHT, "cluster.datacenters=2", "cluster.site_link=1")
    decided, outlook = plan.decided, plan.outlook
    assert outlook is not None and outlook.seconds is not None and outlook.share is not None
    assert (decided.site, decided.world_size, decided.data_ranks) == (2, 32, 32)
    assert decided.replicate * decided.shard == 16
    choice = plan.choices["site"]
    assert choice.source == "rule" and "DiLoCo" in choice.why
    # Four bytes of every parameter cross the link, whatever the mesh of a site is.
    assert outlook.seconds == pytest.approx(4 * PARAMS / (0.956e9 / 8), rel=1e-3)
    assert outlook.bytes_per_rank == pytest.approx(4 * PARAMS / 16, rel=1e-3)
    assert any("sites wait for exchanges" in warning for warning in plan.warnings)
    assert any("GiB of each rank every 100 steps" in text for _, text in forecast_rows(plan))


def test_the_fewest_steps_keep_the_share(plan_of: PlanOf) -> None:
    words = (*EIGHT, "cluster.datacenters=2", "cluster.site_link=1")
    first = plan_of(*words).outlook
    assert first is not None and first.least_steps is not None
    steps = first.least_steps
    more = (f"diloco.steps={steps}", f"train.steps={steps}", f"checkpoint.every={steps}")
    plan = plan_of(*words, *more)
    assert plan.outlook is not None and plan.outlook.share == pytest.approx(0.1, abs=1e-3)
    assert not any("sites wait" in warning for warning in plan.warnings)
    hidden = plan_of(*words, "diloco.overlap_steps=99").outlook
    assert hidden is not None and hidden.waited_s is not None and first.waited_s is not None
    assert hidden.waited_s < first.waited_s - 99


def test_a_fast_link_and_an_unknown_one_are_told(plan_of: PlanOf) -> None:
    fast = plan_of(*EIGHT, "mesh.site=2", "cluster.site_link=3200").warnings
    assert any("no outer step is needed" in warning for warning in fast)
    plan = plan_of(*EIGHT, "mesh.site=2")
    assert any("cluster.site_link is not given" in warning for warning in plan.warnings)
    assert plan.outlook is not None and plan.outlook.seconds is None
    assert plan.choices["site"].source == "user"
    assert Plan.from_dict(plan.to_dict()) == plan


def test_int8_sends_a_quarter_and_outer_state_takes_memory(plan_of: PlanOf) -> None:
    assert exchange_bytes(2560, 2, "fp32") == 4 * 2560
    assert exchange_bytes(2560, 3, "fp32") == 2 * 2 * 4 * 2560 // 3
    assert exchange_bytes(2560, 3, "int8") == 2 * (2560 + 40)
    plan = plan_of(*EIGHT, "mesh.site=2")
    assert plan.memory.outer == 2 * plan.memory.params
    decided = replace(plan.decided, outer_bytes=12)
    assert estimate_memory(plan.model, plan.cluster, decided).outer == 3 * plan.memory.params


def test_what_does_not_fit_sites_is_refused(plan_of: PlanOf) -> None:
    with pytest.raises(UserError, match=r"cluster\.datacenters=3 does not divide 32 ranks"):
        plan_of(*EIGHT, "cluster.datacenters=3")
    with pytest.raises(UserError, match=r"mesh\.tensor with 2 sites were not tried"):
        plan_of(*EIGHT, "mesh.site=2", "mesh.tensor=2")
    with pytest.raises(UserError, match=r"fragments=50, but llama-3\.1-8b has 32 blocks") as caught:
        plan_of(*EIGHT, "mesh.site=2", "diloco.fragments=50")
    assert caught.value.fix == "write diloco.fragments=25"
    with pytest.raises(UserError, match=r"does not give 16 ranks, which mesh\.site leave"):
        plan_of(*EIGHT, "mesh.site=2", "mesh.shard=32", "mesh.replicate=1")


def test_a_job_that_is_one_of_several_sites(plan_of: PlanOf) -> None:
    words = ("model.name=llama-3.1-8b", "data.seq_len=4096", "train.global_batch=96")
    sites = ("mesh.site=2", "diloco.meet=node1:29700", "cluster.site_link=1")
    plans = [
        plan_of(*words, *sites, f"cluster.name={ranks}xH100", f"diloco.site={site}")
        for site, ranks in enumerate((8, 4))
    ]
    for plan, ranks in zip(plans, (8, 4), strict=True):
        decided, outlook = plan.decided, plan.outlook
        assert (decided.site, decided.jobs, decided.world_size) == (1, 2, ranks)
        assert decided.micro_batch * decided.accumulation * ranks * 2 == 96
        assert outlook is not None and outlook.bytes_per_rank == pytest.approx(
            4 * PARAMS / ranks, rel=1e-3
        )
        assert outlook.seconds == pytest.approx(4 * PARAMS / (0.956e9 / 8), rel=1e-3)
        assert "node1:29700" in plan.choices["site"].why
        assert Plan.from_dict(plan.to_dict()) == plan


def test_a_slow_network_between_nodes_makes_the_plan_name_diloco(plan_of: PlanOf) -> None:
    slow = plan_of(*EIGHT, "cluster.interconnect=0.125").warnings
    assert any("cluster.datacenters=4" in each and "joins them in " in each for each in slow)
    assert not any("DiLoCo" in warning for warning in plan_of(*EIGHT).warnings)
