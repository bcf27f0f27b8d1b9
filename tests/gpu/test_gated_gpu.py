"""Gated MLPs on a GPU, in the epilogue of a matmul or in Triton: the numbers of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.kernels.hopper import has_quack, on_hopper
from shardwise.kernels.swiglu import ACTIVATIONS, gated_backward, up_and_product

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no GPU: nothing here was tested"
)
TOKENS, HIDDEN, WIDTH = 512, 256, 768


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def near(one: Tensor, other: Tensor) -> bool:
    """But for the rounding of bf16."""
    difference = (one.cpu().float() - other.float()).norm()
    return bool(one.isfinite().all() and difference < 1e-2 * other.float().norm())


@pytest.mark.parametrize("activation", ACTIVATIONS)
# An odd width fits into no epilogue.
@pytest.mark.parametrize("width", [WIDTH, WIDTH - 4])
def test_both_passes_are_those_of_plain_torch(activation: str, width: int) -> None:
    print("epilogue" if has_quack() and on_hopper() and width == WIDTH else "Triton")
    x, weight = random(TOKENS, HIDDEN, seed=0), random(width, HIDDEN, seed=1) / 16
    # Large gates too, where gelu's polynomial leaves the range of exp.
    gate = 4 * random(TOKENS, width, seed=2)
    gate[0, 0], gate[0, 1] = -90.0, 90.0
    down, grad = random(HIDDEN, width, seed=3) / 16, random(TOKENS, HIDDEN, seed=4)
    expected = up_and_product(x, weight, gate, activation)
    found = up_and_product(*(each.cuda() for each in (x, weight, gate)), activation)
    assert all(map(near, found, expected))
    given = grad, down, gate, expected[0]
    backward = gated_backward(*(each.cuda() for each in given), activation)
    assert all(map(near, backward, gated_backward(*given, activation)))
