"""Grouped matmuls in formats that the compiler does not take: the numbers of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from shardwise.kernels.grouped_matmul import grouped_matmul

# The second expert has no rows.
ENDS = torch.tensor([3, 3, 7, 16], dtype=torch.int32)


def sides(dtype: torch.dtype, *, lies_turned: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 40, 24) if lies_turned else (4, 24, 40)
    rows, weights = (torch.randn(each, generator=generator) for each in ((16, 24), shape))
    return rows.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()


def learn(multiply: Any, rows: Tensor, weights: Tensor, *, lies_turned: bool) -> list[Tensor]:
    made = multiply(rows, weights.mT if lies_turned else weights)
    made.square().sum().backward()
    assert rows.grad is not None and weights.grad is not None
    return [made, rows.grad, weights.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lies_turned", [False, True])
def test_numbers_are_those_of_torch(dtype: torch.dtype, lies_turned: bool) -> None:
    found, expected = (
        learn(multiply, *sides(dtype, lies_turned=lies_turned), lies_turned=lies_turned)
        for multiply in (
            lambda rows, weights: grouped_matmul(rows, weights, ENDS),
            lambda rows, weights: grouped_mm(rows, weights, offs=ENDS),
        )
    )
    assert all(map(torch.equal, found, expected))
    assert found[2].stride() == expected[2].stride()


def test_frozen_weights_save_no_rows() -> None:
    rows, weights = sides(torch.float32, lies_turned=False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        grouped_matmul(rows, weights.detach(), ENDS)
    assert [each.shape for each in saved] == [weights.shape, ENDS.shape]


def test_the_compiler_takes_fp32() -> None:
    """Of torch's own it says "Expected inputs of BF16 type"."""

    def block(rows: Tensor, weights: Tensor) -> Tensor:
        return rows + grouped_matmul(rows, weights.mT, ENDS)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(each, generator=generator) for each in ((16, 24), (4, 24, 24)))
    results = []
    for each in (block, compiled):
        given = [side.clone().requires_grad_() for side in (rows, weights)]
        each(*given).square().sum().backward()
        results.append([side.grad for side in given])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
