from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from shardwise.data.order import index_at


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 2049])
def test_every_epoch_reads_every_sequence_once(length: int) -> None:
    for seed in (0, 1, -5, 2**70):
        for epoch in (0, 1, 9):
            positions = range(epoch * length, (epoch + 1) * length)
            order = [index_at(seed, position, length, True) for position in positions]
            assert sorted(order) == list(range(length))


def test_order_differs_between_seeds_and_epochs() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        start = epoch * 1000
        return tuple(index_at(seed, place, 1000, True) for place in range(start, start + 1000))

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(range(1000)) not in orders


def test_without_shuffle_epochs_repeat_in_order() -> None:
    assert [index_at(5, position, 3, False) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_order_is_evenly_spread() -> None:
    firsts = Counter(index_at(0, epoch * 10, 10, True) for epoch in range(5000))
    assert all(400 < firsts[index] < 600 for index in range(10))


def test_all_orders_of_three_occur() -> None:
    orders = Counter(
        tuple(index_at(0, epoch * 3 + place, 3, True) for place in range(3))
        for epoch in range(3000)
    )
    assert len(orders) == 6


def test_neighbours_are_torn_apart() -> None:
    order = [index_at(0, position, 10_000, True) for position in range(10_000)]
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert neighbours < 20  # 2 are expected of a random order


def test_positions_of_a_huge_set_are_found_at_once() -> None:
    length = (1 << 40) - 12345
    places = random.Random(0).sample(range(length), 1000)
    assert len({index_at(1, place, length, True) for place in places}) == 1000


def test_known_values_stay() -> None:
    """Another order would break the promise that a resumed run reads what is left."""
    assert [index_at(0, position, 10, True) for position in range(12)] == [
        *(1, 0, 7, 2, 8, 3, 4, 5, 6, 9),
        *(1, 6),
    ]
