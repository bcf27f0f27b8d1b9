"""Grouped matmuls of experts in float8: near the exact ones, scaled row by row, and sound where an
expert has no row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from shardwise.kernels import float8_experts
from shardwise.kernels.float8 import FORWARD
from shardwise.parallel.grouped_products import product, row_grad, weight_grad

# The second expert has no row, and no end is a multiple of 16.
ENDS = torch.tensor([5, 5, 40, 41], dtype=torch.int32)
ROWS, HIDDEN, WIDTH = 41, 32, 48
# Both factors are rounded by 2^-4 of them at most.
BOUND = 2 * 2**-4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(lies_turned: bool = False) -> Tensor:
    """(experts, out, in), with rows and columns of many magnitudes."""
    made = random(len(ENDS), WIDTH, HIDDEN) * torch.logspace(-2, 2, WIDTH)[None, :, None]
    return made.mT.contiguous().mT if lies_turned else made


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    assert (found.float() - exact.float()).norm() < BOUND * exact.float().norm()
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lies_turned", [False, True])
def test_the_three_products_are_near_the_exact_ones(dtype: torch.dtype, lies_turned: bool) -> None:
    weight = weights(lies_turned).to(dtype)
    # Rows that differ much would have no digits left under one scale for all of them.
    x, grad = (
        (random(ROWS, width, seed=1) * torch.logspace(-3, 3, ROWS)[:, None]).to(dtype)
        for width in (HIDDEN, WIDTH)
    )
    made, exact = (product(x, weight, ENDS, float8=float8) for float8 in (True, False))
    for row, right in zip(made, exact, strict=True):
        assert_near(row, right)
    back, exact = (row_grad(grad, weight, ENDS, float8=float8) for float8 in (True, False))
    for row, right in zip(back, exact, strict=True):
        assert_near(row, right)
    learned, exact = (weight_grad(weight, grad, x, ENDS, float8=f8) for f8 in (True, False))
    assert learned.stride() == exact.stride() == weight.stride()
    assert not learned[1].any() and not exact[1].any()
    for expert in (0, 2, 3):
        assert_near(learned[expert], exact[expert])


def test_a_row_of_the_product_depends_on_no_other_row() -> None:
    x, weight = random(ROWS, HIDDEN), weights()
    whole = product(x, weight, ENDS, float8=True)
    x[6:] *= 1e6
    assert torch.equal(product(x, weight, ENDS, float8=True)[:6], whole[:6])


def test_rows_that_are_dealt_out_are_those_that_were_cast() -> None:
    x, weight = random(7, HIDDEN), weights()
    tokens = torch.arange(ROWS) % 7
    found = product(x, weight, ENDS, float8=True, tokens=tokens)
    assert torch.equal(found, product(x[tokens], weight, ENDS, float8=True))


def test_scales_are_powers_of_two_that_fill_the_format() -> None:
    x = random(20, HIDDEN) * torch.logspace(-8, 30, 20)[:, None]
    codes, steps = float8_experts.cast_rows(x)
    assert codes.dtype == FORWARD
    assert torch.equal(torch.frexp(steps)[0], torch.full((20,), 0.5))
    largest = codes.float().abs().amax(1)
    assert ((largest > 200) & (largest <= 448)).all()


def test_what_is_not_finite_shows() -> None:
    x, weight = random(ROWS, HIDDEN), weights()
    x[8, 3] = torch.inf
    made = product(x, weight, ENDS, float8=True)
    assert made[8].isnan().all() and made[7].isfinite().all()
    learned = weight_grad(weight, random(ROWS, WIDTH), x, ENDS, float8=True)
    assert learned[2, :, 3].isnan().all() and learned[0].isfinite().all()


def test_experts_have_room_for_sixteen_rows_each_at_places_of_their_own() -> None:
    """Which torch's grouped matmul wants along a sum."""
    places = float8_experts.spread_ends(ENDS)
    assert places.tolist() == [16, 32, 80, 96] and places.dtype == torch.int32
    assert float8_experts.room_for(ROWS, len(ENDS)) == 112
    full = torch.tensor([16, 47, 48], dtype=torch.int32)
    assert float8_experts.spread_ends(full)[-1] <= float8_experts.room_for(48, 3)
    rows = random(ROWS, HIDDEN)
    codes, _ = float8_experts.cast_grouped_columns(rows, ENDS, places)
    used = codes.float().t().abs().sum(1) > 0
    assert used.nonzero().flatten().tolist() == [*range(5), *range(32, 67), 80]


def test_the_sum_over_rows_is_that_of_the_rounded_numbers() -> None:
    """Computed here expert by expert, from numbers that float8 holds exactly."""
    left, right = (random(ROWS, width).sign() for width in (WIDTH, HIDDEN))
    places = float8_experts.spread_ends(ENDS)
    cast = (float8_experts.cast_grouped_columns(each, ENDS, places) for each in (left, right))
    one, other = cast
    found = float8_experts.grouped_sum(*one, *other, places, torch.float32)
    assert torch.equal(found, grouped_mm(left.t(), right, offs=ENDS))
