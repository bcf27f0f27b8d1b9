from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, MixtralConfig

from shardwise.errors import ExitCode, UserError
from shardwise.plan.planned import Plan

PlanOf = Callable[..., Plan]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def plan_for(plan_of: PlanOf, tmp_path: Path) -> PlanOf:
    """`plan_for(family, "train.router_aux_loss=off", **fields)`: from a made config.json, where a
    field that is None is left out."""

    def plan(family: str, *overrides: str, **fields: Any) -> Plan:
        config = AutoConfig.for_model(family, **SIZES).to_dict()
        given = {key: value for key, value in {**config, **fields}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(given))
        return plan_of(f"model.name={tmp_path}", "cluster=2xCPU", "data.seq_len=16", *overrides)

    return plan


# Mixtral is counted on paper, the others on a model on meta.
@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "jetmoe"])
def test_the_model_s_config_decides(plan_for: PlanOf, family: str) -> None:
    coefficient = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    silent = plan_for(family, output_router_logits=False)
    assert silent.decided.router_aux_loss == 0
    assert "asks for none" in silent.choices["router_aux_loss"].why
    asking = plan_for(family, output_router_logits=True, **{coefficient: 0.02})
    assert asking.decided.router_aux_loss == 0.02
    assert asking.choices["router_aux_loss"].source == "rule"
    assert "output_router_logits" in asking.choices["router_aux_loss"].why


def test_a_coefficient_that_is_left_to_the_class_is_the_class_s(plan_for: PlanOf) -> None:
    plan = plan_for("mixtral", output_router_logits=True, router_aux_loss_coef=None)
    assert plan.model.source == "counted"
    assert plan.decided.router_aux_loss == MixtralConfig().router_aux_loss_coef


def test_the_user_decides_otherwise(plan_for: PlanOf) -> None:
    asking = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    for off in ("off", "0"):
        plan = plan_for("mixtral", f"train.router_aux_loss={off}", **asking)
        assert (plan.decided.router_aux_loss, plan.choices["router_aux_loss"].source) == (
            0.0,
            "user",
        )
        assert any("asks for a load-balancing loss" in warning for warning in plan.warnings)
    plan = plan_for("mixtral", "train.router_aux_loss=0.1", **asking)
    assert plan.decided.router_aux_loss == 0.1
    assert "asks for 0.02" in plan.choices["router_aux_loss"].why
    assert not any("load-balancing" in warning for warning in plan.warnings)


def test_a_number_turns_it_on_where_the_family_s_own_forward_has_none(plan_for: PlanOf) -> None:
    assert plan_for("glm4_moe", output_router_logits=True).decided.router_aux_loss == 0
    plan = plan_for("glm4_moe", "train.router_aux_loss=0.01")
    assert plan.decided.router_aux_loss == 0.01


def test_a_model_without_routers_is_refused(plan_of: PlanOf) -> None:
    with pytest.raises(UserError) as caught:
        plan_of("model.name=tiny-llama", "cluster=2xCPU", "train.router_aux_loss=0.01")
    assert caught.value.code == ExitCode.CONFIG
    assert "tiny-llama" in caught.value.what
    assert "train.router_aux_loss=off" in caught.value.fix


def test_a_z_loss_is_the_user_s_alone(plan_for: PlanOf, plan_of: PlanOf) -> None:
    asking = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert plan_for("mixtral", **asking).decided.router_z_loss == 0
    plan = plan_for("mixtral", "train.router_z_loss=0.01", "train.router_aux_loss=off")
    assert plan.decided.router_z_loss == 0.01 and plan.choices["router_z_loss"].source == "user"
    with pytest.raises(UserError, match=r"router_z_loss=0\.01 needs a mixture") as caught:
        plan_of("model.name=tiny-llama", "cluster=2xCPU", "train.router_z_loss=0.01")
    assert "train.router_z_loss=0" in caught.value.fix


def test_a_loss_that_is_the_family_s_own_is_refused(plan_for: PlanOf) -> None:
    doge = {"is_moe": True, "num_experts": 16, "output_router_logits": True}
    with pytest.raises(UserError, match="asks for a load-balancing loss") as caught:
        plan_for("doge", **doge)
    assert "not the usual one" in caught.value.why
    assert plan_for("doge", "train.router_aux_loss=off", **doge).decided.router_aux_loss == 0


def test_a_mixture_whose_layers_are_all_dense_has_none(plan_for: PlanOf) -> None:
    dense = {"output_router_logits": True, "mlp_only_layers": [0, 1]}
    assert plan_for("qwen3_moe", **dense).decided.router_aux_loss == 0
    with pytest.raises(UserError, match="needs a mixture of experts") as caught:
        plan_for("qwen3_moe", "train.router_aux_loss=0.1", **dense)
    assert caught.value.why == "none of its layers has a router"


def test_what_the_loss_keeps_is_planned_for(plan_for: PlanOf) -> None:
    without = plan_for("mixtral", "train.micro_batch=2")
    with_it = plan_for("mixtral", "train.micro_batch=2", "train.router_aux_loss=0.1")
    tokens, width = 2 * 16, {"fp32": 4, "bf16": 2}[with_it.decided.param_dtype]
    assert with_it.memory.activations - without.memory.activations == tokens * 2 * 4 * (width + 4)
    half = ("train.micro_batch=2", "precision.param=bf16")
    without, with_z = (
        plan_for("mixtral", *half),
        plan_for("mixtral", *half, "train.router_z_loss=1"),
    )
    assert with_z.memory.activations - without.memory.activations == tokens * 2 * 4 * (2 + 4)
