"""Boxes of a tensor: in each other, in its bytes, and together the whole of it."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise.model.boxes import Box, Sizes, cover_once, whole_box

SHAPES: list[Sizes] = [(), (1,), (7,), (4, 6), (2, 3, 5), (3, 1, 4, 2)]


def random_box(shape: Sizes, chance: random.Random) -> Box:
    offsets = tuple(chance.randint(0, size) for size in shape)
    sizes = (chance.randint(0, size - start) for size, start in zip(shape, offsets, strict=True))
    return Box(offsets, tuple(sizes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_runs_are_the_boxs_elements_in_order(shape: Sizes) -> None:
    chance = random.Random(0)
    whole = torch.arange(whole_box(shape).num_elements).view(shape)
    for box in [whole_box(shape), *(random_box(shape, chance) for _ in range(200))]:
        found = [element for run in box.runs_in(shape) for element in run]
        assert found == whole[box.slices].flatten().tolist()


def test_whole_dims_lie_together() -> None:
    assert list(Box((2, 0, 0), (3, 4, 5)).runs_in((8, 4, 5))) == [range(40, 100)]
    assert list(Box((0, 1, 0), (2, 2, 5)).runs_in((2, 4, 5))) == [range(5, 15), range(25, 35)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_overlap_is_what_both_hold(shape: Sizes) -> None:
    chance = random.Random(1)
    for _ in range(200):
        one, other = random_box(shape, chance), random_box(shape, chance)
        marks = torch.zeros(shape)
        marks[one.slices] += 1
        marks[other.slices] += 1
        common = one.overlap(other)
        assert common.num_elements == int((marks == 2).sum())
        if common.num_elements:
            assert bool((marks[common.slices] == 2).all())
            inside = torch.arange(marks.numel()).view(shape)[one.slices]
            expected = torch.arange(marks.numel()).view(shape)[common.slices]
            assert torch.equal(inside[common.seen_from(one).slices], expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_any_dim_cover_once(dim: int) -> None:
    shape = (8, 8)
    shards = []
    for start in range(0, 8, 2):
        offsets = (start, 0) if dim == 0 else (0, start)
        shards.append(Box(offsets, (2, 8) if dim == 0 else (8, 2)))
    assert cover_once(shape, shards)
    assert not cover_once(shape, shards[:-1])
    assert not cover_once(shape, [*shards[:-1], shards[0]])


def test_a_scalar_is_covered_once() -> None:
    assert cover_once((), [Box((), ())])
    assert not cover_once((), [])
    assert not cover_once((), [Box((), ()), Box((), ())])


def test_columns_of_many_ranks_are_checked_at_once() -> None:
    """Not each against each: that would take minutes for all tensors of a large model."""
    shape = (8, 2 * 20_000)
    assert cover_once(shape, [Box((0, 2 * rank), (8, 2)) for rank in range(20_000)])
