from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardwise.data.mixture import MixedSequences
from shardwise.data.sequences import Sequence


class Numbered:
    """Sequences that hold the number of their set and their own."""

    seq_len = 2

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length

    def __len__(self) -> int:
        return self.length

    def get(self, index: int) -> Sequence:
        row = np.array([self.number, index], dtype=np.int64)
        return Sequence(row, row)


def read(mixed: MixedSequences, positions: range) -> list[tuple[int, ...]]:
    return [tuple(mixed.get(position).inputs.tolist()) for position in positions]


@pytest.mark.parametrize("shuffle", [True, False])
def test_sets_are_read_by_their_shares_each_in_passes(shuffle: bool) -> None:
    sets = [Numbered(0, 500), Numbered(1, 40), Numbered(2, 7)]
    mixed = MixedSequences(sets, [0.7, 0.2, 0.1], seed=3, shuffle=shuffle)
    found = read(mixed, range(2048))
    counts = Counter(number for number, _ in found)
    assert counts[0] == pytest.approx(1434, abs=2) and counts[2] == pytest.approx(205, abs=2)
    for own in sets:
        mine = [index for number, index in found if number == own.number]
        # Within a block of positions turns are taken in another order, but none is left out.
        times = Counter(mine)
        passes = len(mine) / own.length
        assert set(times) == set(range(own.length))
        assert max(times.values()) - min(times.values()) <= (2 if shuffle else 1)
        assert min(times.values()) >= int(passes) - 1


def test_a_position_alone_decides_what_is_read() -> None:
    sets = [Numbered(0, 11), Numbered(1, 5)]
    one, other = (MixedSequences(sets, [0.6, 0.4], seed=1, shuffle=True) for _ in range(2))
    whole = read(one, range(3000))
    assert [read(other, range(at, at + 1))[0] for at in range(2999, -1, -1)] == whole[::-1]
    assert read(MixedSequences(sets, [0.6, 0.4], seed=2, shuffle=True), range(3000)) != whole


def test_far_positions_have_the_same_shares() -> None:
    mixed = MixedSequences(
        [Numbered(0, 9), Numbered(1, 9), Numbered(2, 9)], [1 / 3] * 3, seed=0, shuffle=False
    )
    far = 10**11
    numbers = Counter(mixed.place(position)[0] for position in range(far, far + 300))
    assert all(count == pytest.approx(100, abs=2) for count in numbers.values())
    assert mixed.place(far)[1] == pytest.approx(far / 3, rel=1e-6)
