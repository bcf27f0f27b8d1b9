"""Parameters that an axis divides before FSDP2 does: every element is somewhere, once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.boxes import Box, cover_once, whole_box
from shardwise.model.cuts import Cut, cut_parameter, cuts_by_param, cuts_of
from shardwise.model.weights import Portion

SHAPES = [((7, 3), 0, 1), ((12, 3), 0, 2), ((3, 12, 5), 1, 2), ((4, 6), 1, 1), ((2, 3), 0, 1)]


def parts_by_chunk(whole: Tensor, cut: Cut) -> Tensor:
    """The part of a rank, by torch itself."""
    stacked = whole.chunk(cut.stacked, cut.dim)
    empty = whole.narrow(cut.dim, 0, 0)
    parts = [[*each.chunk(cut.count, cut.dim), *[empty] * cut.count][cut.index] for each in stacked]
    return torch.cat(parts, cut.dim)


@pytest.mark.parametrize(("shape", "dim", "stacked"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_those_of_chunk(
    shape: tuple[int, ...], dim: int, stacked: int, count: int
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    boxes: list[Box] = []
    for index in range(count):
        cut = Cut("tensor", dim, index, count, stacked, shape)
        expected = parts_by_chunk(whole, cut)
        assert cut.own_shape == tuple(expected.shape)
        portion = Portion(torch.full(cut.own_shape, -1.0), cut)
        portion.fill(whole)
        assert torch.equal(portion.tensor, expected)
        assert portion.shape == shape
        boxes += [box for box, _ in portion.places]
    assert cover_once(shape, boxes)


def test_boxes_of_a_part_are_found_in_the_whole() -> None:
    whole = torch.arange(24.0).view(12, 2)
    cut = Cut("tensor", 0, 1, 2, 2, (12, 2))
    part = parts_by_chunk(whole, cut)
    for start, size, column in product(range(6), range(1, 4), range(2)):
        box = Box((start, column), (min(size, 6 - start), 1))
        found = torch.full_like(part, -1.0)
        for outer, inner in cut.places(box):
            found[box.slices][inner.slices] = whole[outer.slices]
        assert torch.equal(found[box.slices], part[box.slices])


def test_modules_remember_their_cuts_through_new_storage() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[1].weight.requires_grad_(False)
    cut = Cut("tensor", 1, 0, 2)
    cut_parameter(model[1], "weight", cut)
    assert model[1].weight.shape == (4, 3) and not model[1].weight.requires_grad
    model.to_empty(device="cpu")
    assert cuts_of(model) == {"1.weight": replace(cut, shape=(4, 6))}
    assert list(cuts_by_param(model)) == [model[1].weight]
    assert cuts_of(nn.Linear(2, 2)) == {}


def test_an_uncut_tensor_is_one_box() -> None:
    assert Portion(torch.zeros(3, 2)).places == [(whole_box((3, 2)), whole_box((3, 2)))]
