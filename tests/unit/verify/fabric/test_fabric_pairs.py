from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from shardwise.metrics.clock import Round
from shardwise.verify.fabric.found import Flow, Pair
from shardwise.verify.fabric.judge_fabric import good_rate
from shardwise.verify.fabric.pairs import rounds_of, shared_seconds


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 16])
def test_everyone_meets_everyone_once_and_nobody_is_in_two_places(count: int) -> None:
    rounds = list(rounds_of(count))
    for couples in rounds:
        members = Counter(member for couple in couples for member in couple)
        assert set(members.values()) <= {1}
    met = [tuple(sorted(couple)) for couples in rounds for couple in couples]
    assert sorted(met) == list(combinations(range(count), 2))
    assert len(rounds) <= max(1, count)


def test_a_pair_is_as_fast_as_all_its_flows_together() -> None:
    pair = Pair("between", 1000, (Flow(0, 2, 0.5), Flow(1, 3, 1.0)))
    assert pair.rate == 2000
    assert (pair.slowest.sender, pair.slowest.receiver) == (1, 3)


@pytest.mark.parametrize(
    ("rates", "good"),
    [
        ([10, 10], 10),
        ([1, 10], 10),  # one way of the only pair is slow
        ([1, 1, 1, 1, 10, 10], 10),  # one of three nodes is slow, both ways
        ([10] * 11 + [20], 10),  # one that is too good does not make the others bad
    ],
)
def test_what_a_good_pair_reaches(rates: list[float], good: float) -> None:
    assert good_rate(rates) == good


def test_a_flow_that_begins_late_makes_no_link_faster() -> None:
    # Ranks 0 and 1 send to 2 and 3, whose machine has another clock; 1 and 3 begin 0.4 s later.
    found = Round(2, begun=(0.0, 0.4, 50.0, 50.4), ended=(1.0, 1.4, 51.0, 51.4))
    assert shared_seconds([(0, 2), (1, 3)], found) == pytest.approx([0.5, 0.7])
    assert shared_seconds([(1, 3)], found) == pytest.approx([0.5])
