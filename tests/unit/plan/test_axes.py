"""What the sizes of the axes mean for ranks, batches and the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.plan import axes
from shardwise.plan.plan import Plan

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """A plan of some settings, with all axes in use."""
    monkeypatch.setattr(axes, "SUPPORTED", ("replicate", "shard", "tensor", "context", "expert"))

    def make(*settings: str) -> Plan:
        return choose_plan(load_config(None, ["data.seq_len=64", *settings]), environ={})

    return make


def test_the_world_is_the_product_of_all_axes_but_experts(plan_with: MakePlan) -> None:
    plan = plan_with(
        *("model.name=tiny-mixtral", "cluster.name=8xCPU"),
        *("mesh.tensor=2", "mesh.context=2", "mesh.expert=4", "mesh.shard=2"),
    )
    decided = plan.decided
    assert (decided.replicate, decided.shard, decided.world_size) == (1, 2, 8)
    assert plan.world_size == 8 and decided.data_ranks == 2
    assert axes.mesh_in_words(decided) == "replicate=1 x shard=2 x context=2 x tensor=2 x expert=4"
    assert plan.choices["tensor"].source == "user"


def test_ranks_that_share_a_batch_count_once(plan_with: MakePlan) -> None:
    plan = plan_with(
        "model.name=tiny-llama", "cluster.name=4xCPU", "mesh.tensor=2", "train.global_batch=6"
    )
    decided = plan.decided
    assert decided.micro_batch * decided.accumulation * decided.data_ranks == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("mesh.tensor=3",), r"mesh.tensor=3 x mesh.context=1 does not divide 4 ranks"),
        (("mesh.tensor=2", "mesh.shard=4"), "does not give 2 ranks, which mesh.tensor leave"),
    ],
)
def test_axes_that_do_not_fit_are_refused(
    plan_with: MakePlan, settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words) as found:
        plan_with("model.name=tiny-llama", "cluster.name=4xCPU", *settings)
    assert found.value.fix
