"""A run that misses its plan says so, and what was wrong."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.metrics.verdict import plan_misses
from shardwise.plan.planned import Plan


def misses(plan: Plan, speed: float, memory: float = 1.0, waiting: float = 0.0) -> list[str]:
    assert plan.forecast is not None
    step: dict[str, Any] = {
        "tokens_per_s": speed * plan.forecast.tokens_per_s,
        "data_share": waiting,
        "memory": {"allocated": int(memory * plan.memory.allocated)},
    }
    warm_up = {**step, "tokens_per_s": 1.0}
    return list(plan_misses(plan, [warm_up, step, step]))


@pytest.mark.parametrize("speed", [0.91, 1.0, 1.09])
def test_inside_the_band_nothing_is_said(plan: Plan, speed: float) -> None:
    assert misses(plan, speed, memory=1.04) == []


def test_a_slow_run_names_the_terms_it_rests_on(plan: Plan) -> None:
    (text,) = misses(plan, 0.8)
    assert "-20% of the plan" in text and "matmul" in text and "shardwise tunnel" in text


def test_a_run_that_waits_for_data_says_so(plan: Plan) -> None:
    (text,) = misses(plan, 0.7, waiting=0.3)
    assert "30% of the time went to waiting for data" in text


def test_memory_that_was_not_foreseen_is_named(plan: Plan) -> None:
    (text,) = misses(plan, 1.0, memory=1.2)
    assert "+20%" in text and "activations" in text
