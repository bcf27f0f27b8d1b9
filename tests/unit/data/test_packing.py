"""Conversations in windows: each whole and once, unless windows may cut them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shardwise.data.packing import Windows, pack


def packed(lengths: list[int], seq_len: int, packing: str) -> Windows:
    sizes = np.array(lengths, dtype=np.int64)
    return pack(np.cumsum(sizes) - sizes, sizes, seq_len, packing)  # type: ignore[arg-type]


def lengths_of(windows: Windows) -> list[list[int]]:
    sizes = np.diff(windows.pieces)[:, 0]
    firsts = windows.firsts
    return [sizes[firsts[i] : firsts[i + 1]].tolist() for i in range(len(windows))]


def test_each_goes_into_the_fullest_window_that_has_room() -> None:
    assert lengths_of(packed([3, 6, 4, 2, 5], 10, "best_fit")) == [[6, 4], [5, 3, 2]]
    assert lengths_of(packed([7, 6, 3, 4], 10, "best_fit")) == [[7, 3], [6, 4]]
    assert lengths_of(packed([10, 10], 10, "best_fit")) == [[10], [10]]


@pytest.mark.parametrize("seed", range(5))
def test_whole_conversations_are_packed_once_and_closely(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [min(512, 1 + int(draw.lognormvariate(4, 1))) for _ in range(1000)]
    windows = packed(lengths, 512, "best_fit")
    assert sorted(windows.pieces[:, 0].tolist()) == (np.cumsum(lengths) - lengths).tolist()
    assert sorted(size for window in lengths_of(windows) for size in window) == sorted(lengths)
    assert max(map(sum, lengths_of(windows))) <= 512
    assert windows.num_tokens == sum(lengths)
    # No packing needs fewer, and this one wastes at most a window in fifty here.
    assert len(windows) <= 1.02 * sum(lengths) / 512 + 1
    again = packed(lengths, 512, "best_fit")
    assert np.array_equal(windows.pieces, again.pieces)


def test_one_gives_each_a_window() -> None:
    assert lengths_of(packed([3, 6, 4], 10, "one")) == [[3], [6], [4]]


def test_cut_fills_every_window_but_the_last() -> None:
    windows = packed([3, 25, 4, 8], 10, "cut")
    assert lengths_of(windows) == [[3, 7], [10], [8, 2], [2, 8]]
    assert windows.pieces.tolist()[:3] == [[0, 3], [3, 10], [10, 20]]
    assert lengths_of(packed([4, 3], 10, "cut")) == [[4, 3]]
