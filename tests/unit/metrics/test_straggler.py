"""A rank is named when the others wait for it in nearly every step, and only then."""

from __future__ import annotations

import random

import pytest

from shardwise.metrics.straggler import judge_waits

STEPS = 10


def waits_of(ranks: int, late: dict[int, float], steps: int = STEPS) -> list[list[float]]:
    """Waits by rank and step: all ranks wait until the last one comes."""
    latest = max(late.values())
    return [[latest - late.get(rank, 0.0) + 0.01] * steps for rank in range(ranks)]


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        (waits_of(4, {1: 0.2}), 1),
        (waits_of(2, {0: 0.25}), 0),
        (waits_of(4, {2: 0.01}), None),
        (waits_of(4, {0: 0.2, 3: 0.3}), 3),
        (waits_of(1, {0: 0.2}), None),
    ],
)
def test_the_rank_that_waits_least_is_the_one_that_is_late(
    waits: list[list[float]], late: int | None
) -> None:
    found = judge_waits(waits, late_s=0.1)
    assert (None if found is None else found["rank"]) == late
    assert found is None or found["behind_s"] == pytest.approx(0.2, abs=0.11)


@pytest.mark.parametrize(("slow_steps", "is_named"), [(8, False), (9, True)])
def test_it_takes_nine_steps_of_ten(slow_steps: int, is_named: bool) -> None:
    waits = [[0.0] * (STEPS - slow_steps) + [0.2] * slow_steps, [0.0] * STEPS]
    assert (judge_waits(waits, late_s=0.1) is not None) == is_named


def test_a_rank_that_was_named_stays_so_until_it_is_rarely_late() -> None:
    waits = [[0.0] * 5 + [0.2] * 5, [0.0] * STEPS]
    assert judge_waits(waits, late_s=0.1) is None
    assert judge_waits(waits, late_s=0.1, named=0) is None
    found = judge_waits(waits, late_s=0.1, named=1)
    assert found is not None and found["rank"] == 1
    assert judge_waits([[0.0] * 6 + [0.2] * 4, [0.0] * STEPS], late_s=0.1, named=1) is None


def test_one_long_pause_names_nobody() -> None:
    waits = [[0.01] * 9 + [30.0], [0.01] * 10]
    assert judge_waits(waits, late_s=0.05) is None


def test_ranks_that_are_late_by_turns_are_not_named() -> None:
    chance = random.Random(0)
    named = 0
    for _ in range(1000):
        lags = [[chance.uniform(0, 0.4) for _ in range(STEPS)] for _ in range(2)]
        waits = [[max(pair) - own for own, pair in zip(lag, zip(*lags, strict=True), strict=True)]
                 for lag in lags]  # fmt: skip
        named += judge_waits(waits, late_s=0.1) is not None
    assert named <= 2
