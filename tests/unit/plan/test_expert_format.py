"""Experts in float8 as the planner sees them: never by itself, with reasons, in the forecast."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.errors import UserError
from shardwise.plan.planned import Plan

PlanOf = Callable[..., Plan]
MIXTRAL = ("model.name=mixtral-8x7b", "cluster.name=4x8xH200", "data.seq_len=4096")
FLOAT8 = "precision.experts=float8"


def test_they_are_never_chosen_but_their_absence_has_a_reason(plan_of: PlanOf) -> None:
    choice = plan_of(*MIXTRAL).choices["experts"]
    assert (choice.value, choice.source) == ("param", "rule")
    assert "float8 changes the numbers" in choice.why
    dense = plan_of("model.name=llama-3.1-8b", "cluster.name=8xH200").choices["experts"]
    assert (dense.value, dense.why) == ("param", "the model has none")


def test_memory_and_speed_follow(plan_of: PlanOf) -> None:
    fixed = ("train.micro_batch=2", "memory.checkpoint_activations=none", "mesh.expert=1")
    plain, float8 = plan_of(*MIXTRAL, *fixed), plan_of(*MIXTRAL, *fixed, FLOAT8)
    assert plain.forecast and float8.forecast
    assert float8.forecast.tokens_per_s > plain.forecast.tokens_per_s
    assert 0.55 < float8.forecast.terms["matmul"] / plain.forecast.terms["matmul"] < 0.7
    # Casts move bytes.
    assert float8.forecast.terms["elementwise"] > plain.forecast.terms["elementwise"]
    # Gate and up of a block in one byte each, beside what bf16 has.
    stack = 8 * 2 * 14336 * 4096
    assert plain.memory.total < float8.memory.total < plain.memory.total + 1.5 * stack
    assert "not yet run on a GPU" in float8.choices["experts"].why


def test_narrow_experts_gain_less(plan_of: PlanOf) -> None:
    node = ("cluster.name=8xH200", "data.seq_len=4096", "memory.checkpoint_activations=full")
    gains = []
    for model in ("mixtral-8x7b", "qwen3-30b-a3b"):
        common = (f"model.name={model}", *node, "train.micro_batch=2", "mesh.expert=1")
        plain, float8 = plan_of(*common).forecast, plan_of(*common, FLOAT8).forecast
        assert plain and float8
        gains.append(float8.tokens_per_s / plain.tokens_per_s)
    assert gains[0] > gains[1]


def test_a_cpu_emulates_them(plan_of: PlanOf) -> None:
    sizes = ("num_hidden_layers=2", "hidden_size=64", "intermediate_size=64", "vocab_size=256")
    small = [f"model.overrides.{size}" for size in sizes]
    plan = plan_of("model.name=mixtral-8x7b", "cluster.name=2xCPU", FLOAT8, *small)
    assert (plan.decided.experts, plan.decided.param_dtype) == ("float8", "fp32")
    assert "a CPU computes the rounded numbers in fp32" in plan.choices["experts"].why


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=llama-3.1-8b",), "changes nothing of llama-3.1-8b"),
        (("cluster.name=8xA100",), "is not for"),
        (("cluster.name=8xB200",), "is not for"),
        (("precision.param=fp32",), "does not work with precision.param=fp32"),
        (("precision.param=fp16",), "does not work with precision.param=fp16"),
        (("train.kernels=torch",), "does not work with train.kernels=torch"),
        (("model.overrides.intermediate_size=14344",), "14344 channels of an expert"),
        (("adapter.method=lora",), "experts with adapters"),
        (("mesh.tensor=2",), "precision.experts"),
        (("mesh.pipeline=2",), "precision.experts"),
    ],
)
def test_what_it_is_not_for_is_refused(plan_of: PlanOf, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(*MIXTRAL, FLOAT8, *words)
    assert said in str(caught.value)
    assert "fix: " in str(caught.value) or "fix" in repr(caught.value)
