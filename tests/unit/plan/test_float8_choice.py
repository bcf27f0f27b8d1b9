"""Float8 as the planner sees it: never by itself, with reasons, in the forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.plan.planned import Plan

PlanOf = Callable[..., Plan]
NODE = ("model.name=llama-3.1-8b", "cluster.name=8xH200", "data.seq_len=4096")
FLOAT8 = (*NODE, "precision.linear=float8")


def test_it_is_never_chosen_but_its_absence_has_a_reason(plan_of: PlanOf) -> None:
    plan = plan_of(*NODE)
    assert (plan.decided.linear, plan.choices["linear"].source) == ("param", "rule")
    assert "float8 changes the numbers" in plan.choices["linear"].why
    assert plan.decided.float8_gather is False
    assert (
        plan_of("model.name=llama-3.1-8b", "cluster.name=8xA100").choices["linear"].why
        == "as param"
    )
    assert plan_of(*NODE, "precision.linear=param").choices["linear"].source == "user"


def test_the_printed_plan_names_the_layers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.2-1b\nprecision: {linear: float8}\ncluster: 8xH200\n")
    done = CliRunner().invoke(app, ["plan", str(file)], catch_exceptions=False)
    shown = " ".join(done.stdout.split())
    assert (
        " linear float8 user given; 80 linear layers, 5 in each block; not k and v (2048 x 512 is "
        "below precision.float8_min_features=1024); head, norms and embedding stay as they are"
    ) in shown
    assert " float8_gather yes rule one byte per weight" in shown


def test_memory_and_speed_follow(plan_of: PlanOf) -> None:
    fixed = (
        "train.micro_batch=4",
        "memory.checkpoint_activations=none",
        "shard.strategy=full_shard",
    )
    plain, tensor, row = (
        plan_of(*NODE, *fixed, f"precision.linear={linear}")
        for linear in ("param", "float8", "float8_rowwise")
    )
    assert plain.forecast and tensor.forecast and row.forecast
    speeds = [each.forecast.tokens_per_s for each in (plain, row, tensor)]
    assert speeds == sorted(speeds)
    assert 1.2 < speeds[2] / speeds[0] < 1.8
    assert tensor.memory.activations < plain.memory.activations
    # torchao's own arithmetic keeps cast weights from forward to backward, ours keeps inputs.
    assert row.memory.gathered > tensor.memory.gathered == plain.memory.gathered
    assert row.memory.activations < tensor.memory.activations


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("precision.linear=float8_rowwise",), "a scale for each column"),
        (("memory.offload=cpu",), "weights in host memory"),
        (("shard.strategy=full_shard", "shard.reshard_after_forward=4"), "FSDP2 cannot cast"),
        (("cluster.name=3x8xH200", "shard.strategy=full_shard"), "do not divide over 24 ranks"),
    ],
)
def test_weights_that_cannot_be_cast_first_are_gathered_as_ever(
    plan_of: PlanOf, more: tuple[str, ...], why: str
) -> None:
    plan = plan_of(*FLOAT8, *more)
    assert plan.decided.float8_gather is False
    assert why in plan.choices["float8_gather"].why


def test_gathers_of_one_byte_take_half_the_time(plan_of: PlanOf) -> None:
    # Slow links, so that nothing hides.
    slow = ("cluster.name=2x8xH200", "shard.strategy=full_shard", "cluster.interconnect=1.0")
    fixed = ("train.micro_batch=1", "memory.checkpoint_activations=none", *slow)
    narrow = plan_of(*FLOAT8, *fixed).forecast
    wide = plan_of(*FLOAT8, *fixed, "shard.reshard_after_forward=8").forecast
    assert narrow and wide
    # Two gathers and a reduce-scatter of four bytes: 1 + 1 + 4 against 2 + 2 + 4.
    assert narrow.terms["exposed"] / wide.terms["exposed"] == pytest.approx(6 / 8, rel=0.02)


@pytest.mark.parametrize("linear", ["float8", "float8_rowwise"])
def test_stacked_experts_get_no_forecast_of_float8(plan_of: PlanOf, linear: str) -> None:
    node = ("model.name=mixtral-8x7b", "cluster.name=4x8xH200")
    plain, changed = plan_of(*node), plan_of(*node, f"precision.linear={linear}")
    assert "128 linear layers, 4 in each block; not the experts" in changed.choices["linear"].why
    assert changed.forecast == plain.forecast
    assert changed.memory == plain.memory


def test_unknown_families_are_left_to_the_run(plan_of: PlanOf) -> None:
    assert (
        "the run prints"
        in plan_of("model.name=gpt2", *FLOAT8[1:], "data.seq_len=1024").choices["linear"].why
    )


def test_a_plan_from_before_is_read(plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of(*NODE)
    data = plan.to_dict()
    for name in ("linear", "float8_gather"):
        del data["choices"][name]
    for name in ("linear", "float8_min_features"):
        del data["config"]["precision"][name]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    old = Plan.load(tmp_path / "plan.json")
    assert (old.decided.linear, old.decided.float8_gather) == ("param", False)
    newer = {name: plan.choices[name] for name in ("linear", "float8_gather")}
    assert old.with_choices(**newer) == plan
