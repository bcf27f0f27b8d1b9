"""The axes along which ranks share work, as the planner chooses them: legal sizes only, and no axis
without a gain."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.plan import axis_sizes, search
from shardwise.plan.planned import Plan

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    monkeypatch.setattr(
        axis_sizes, "SUPPORTED", ("replicate", "shard", "tensor", "context", "expert")
    )

    def make(*settings: str) -> Plan:
        return choose_plan(load_config(None, list(settings)), environ={})

    return make


def sizes(plan: Plan) -> tuple[int, int, int]:
    return plan.decided.tensor, plan.decided.context, plan.decided.expert


def test_inside_a_node_no_axis_is_used_without_a_gain(plan_with: MakePlan) -> None:
    plan = plan_with("model.name=llama-3.1-8b", "cluster.name=8xH100", "data.seq_len=8192")
    assert sizes(plan) == (1, 1, 1)
    assert "tensor=2" in plan.choices["tensor"].why
    assert "slower" in plan.choices["tensor"].why


def test_an_axis_must_gain_more_than_another_mesh(
    plan_with: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("model.name=qwen3-30b-a3b", "cluster.name=8xH200", "data.seq_len=4096")
    assert sizes(plan_with(*settings)) == (1, 1, 1)
    monkeypatch.setattr(search, "AXIS_GAIN", -0.5)
    assert sizes(plan_with(*settings)) != (1, 1, 1)


def test_experts_are_dealt_out_where_gathering_them_is_too_much(plan_with: MakePlan) -> None:
    plan = plan_with("model.name=deepseek-v3", "cluster.name=64x8xH100", "data.seq_len=4096")
    assert plan.decided.expert > 1
    assert plan.choices["expert"].source in ("rule", "search")
    assert plan.choices["expert"].why.endswith("faster than expert=1")


def test_sequences_are_split_only_where_they_do_not_fit_whole(plan_with: MakePlan) -> None:
    short = ("model.name=llama-3.1-8b", "cluster.name=8xH100", "data.seq_len=4096")
    assert plan_with(*short).decided.context == 1
    longer = plan_with(
        *short, "data.seq_len=1048576", "model.overrides.max_position_embeddings=2000000"
    )
    assert longer.decided.context > 1


def test_only_sizes_that_divide_are_tried(plan_with: MakePlan) -> None:
    # 28 heads, and 4 of keys and values.
    plan = plan_with("model.name=qwen2.5-7b", "cluster.name=8xH100")
    tried = {word for each in plan.alternatives for word in each.label.split(", ")}
    assert {"tensor 2", "tensor 4"} <= tried
    assert "tensor 8" not in tried


def test_a_mesh_of_the_user_stays_as_it_is(plan_with: MakePlan) -> None:
    common = ("model.name=llama-3.1-70b", "cluster.name=4x8xH100", "memory.offload=cpu")
    for given in ("shard.strategy=full_shard", "mesh.shard=8"):
        assert sizes(plan_with(*common, given)) == (1, 1, 1)
    assert plan_with(*common, "mesh.tensor=4").decided.tensor == 4


def test_a_plan_with_all_axes_takes_less_than_a_second(plan_with: MakePlan) -> None:
    plan_with("model.name=tiny-llama", "cluster.name=2xCPU")  # imports
    start = time.process_time()
    plan_with("model.name=deepseek-v3", "cluster.name=64x8xH100", "data.seq_len=4096")
    assert time.process_time() - start < 3  # a third of that where nothing else runs


@pytest.mark.parametrize(
    ("settings", "words", "fix"),
    [
        (("mesh.tensor=8",), "the model.s 28 heads", "mesh.tensor=4"),
        (("mesh.expert=2",), "qwen2.5-7b has no experts", "mesh.expert=1"),
        (("mesh.context=8", "data.seq_len=4100"), "sequences of 4100 tokens", "data.seq_len=4096"),
        (
            ("model.name=mixtral-8x7b", "mesh.expert=16", "cluster.name=4x8xH100"),
            "does not divide the 8 experts",
            "mesh.expert=8",
        ),
        (
            ("model.name=mixtral-8x7b", "mesh.expert=8", "mesh.shard=2", "mesh.replicate=4"),
            "does not divide the 2 ranks of one copy",
            "mesh.expert=2",
        ),
    ],
)
def test_sizes_that_do_not_suit_are_refused_with_one_that_does(
    plan_with: MakePlan, settings: tuple[str, ...], words: str, fix: str
) -> None:
    common = ("model.name=qwen2.5-7b", "cluster.name=8xH100", "data.seq_len=4096")
    with pytest.raises(UserError, match=words) as found:
        plan_with(*common, *settings)
    assert fix in (found.value.fix or "")


def test_a_plan_says_which_axes_have_not_run_on_several_gpus(plan_with: MakePlan) -> None:
    settings = ("model.name=qwen3-30b-a3b", "data.seq_len=4096")
    plan = plan_with(*settings, "cluster.name=8xH100", "mesh.expert=4")
    (said,) = (warning for warning in plan.warnings if "has not run on several" in warning)
    assert said.startswith("mesh.expert=4 gave the losses of one process on one GPU")
    assert said.endswith("compare a short run with mesh.expert=1")
    without = plan_with(*settings, "cluster.name=8xH100", "mesh.expert=1", "mesh.tensor=1")
    assert not any("has not run" in warning for warning in without.warnings)
