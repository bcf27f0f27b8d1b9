"""Objectives in a plan: their reasons, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.plan.explain import forecast_rows
from shardwise.plan.planned import Plan

WORDS = (
    *("model=llama-3.1-8b", "cluster=8xH100", "shard.strategy=full_shard", "train.micro_batch=1"),
    *("data.source=jsonl", "data.path=missing.jsonl", "memory.checkpoint_activations=none"),
)


def test_comparing_takes_longer_and_a_reference_is_named(plan_of: Callable[..., Plan]) -> None:
    plain = plan_of(*WORDS, "data.format=auto")
    simpo, dpo = (
        plan_of(*WORDS, "data.format=pairs", f"preference={name}") for name in ("simpo", "dpo")
    )
    assert plain.forecast is not None and simpo.forecast is not None and dpo.forecast is not None
    assert plain.choices["objective"].value == "none"
    assert (simpo.decided.objective, dpo.decided.objective) == ("simpo", "dpo")
    # One more matmul with the head, of about a seventh of the model.
    assert 1.01 < simpo.forecast.step_s / plain.forecast.step_s < 1.1
    assert dpo.forecast.step_s == simpo.forecast.step_s
    assert "it needs no reference" in simpo.choices["objective"].why
    assert "the reference is the first weights" in dpo.choices["objective"].why
    assert "reference" not in dict(forecast_rows(simpo))
    assert (
        "for 1,000 sequences, once before the first step" in dict(forecast_rows(dpo))["reference"]
    )
    # A forward is about a third of a step.
    assert dpo.forecast.reference_s is not None
    assert 0.2 < dpo.forecast.reference_s / plain.forecast.step_s < 0.45
    assert dpo.settings.preference.beta == 0.1 and simpo.settings.preference.beta == 2.0
    assert Plan.from_dict(dpo.to_dict()) == dpo


def test_the_kl_term_takes_one_more_forward(plan_of: Callable[..., Plan]) -> None:
    kto = (*WORDS, "data.format=labelled", "preference=kto")
    with_kl, without = plan_of(*kto), plan_of(*kto, "preference.kl_term=false")
    assert with_kl.decided.kl_term and not without.decided.kl_term
    assert "one more forward in each step" in with_kl.choices["kl_term"].why
    assert with_kl.forecast is not None and without.forecast is not None
    assert 1.15 < with_kl.forecast.step_s / without.forecast.step_s < 1.45
    assert with_kl.forecast.reference_s == 2 * (without.forecast.reference_s or 0.0)
