"""The three grouped matmuls of a stack of experts: forward, and the gradients of rows and weights.

Weights are (experts, out, in), as they lie in memory or as a view. Rows are sorted by expert, and
those of expert e end at ends[e].
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.float8 import FORWARD
from shardwise.kernels.float8_experts import (
    cast_grouped_columns,
    cast_rows,
    cast_turned,
    grouped_product,
    grouped_sum,
    spread_ends,
)
from shardwise.kernels.grouped_matmul import grouped_matmul


def product(
    x: Tensor, weight: Tensor, ends: Tensor, *, float8: bool, tokens: Tensor | None = None
) -> Tensor:
    """x @ weight.T; row i of what is multiplied is row tokens[i] of `x`, where tokens are given."""
    if not float8:
        return grouped_matmul(x if tokens is None else x[tokens], weight.mT, ends)
    codes, steps = cast_rows(x)
    if tokens is not None:
        # A row's codes are the same wherever it is dealt to, and are half its bytes.
        codes, steps = codes.view(torch.uint8)[tokens].view(FORWARD), steps[tokens]
    return grouped_product(codes, steps, *cast_rows(weight), ends, x.dtype, True)


def row_grad(grad: Tensor, weight: Tensor, ends: Tensor, *, float8: bool) -> Tensor:
    """grad @ weight"""
    if not float8:
        return grouped_matmul(grad, weight, ends)
    return grouped_product(*cast_rows(grad), *cast_turned(weight), ends, grad.dtype, False)


def weight_grad(
    weight: Tensor, grad: Tensor, rows: Tensor, ends: Tensor, *, float8: bool
) -> Tensor:
    """grad.T @ rows for each expert, in memory as the weight is, so that nobody has to copy it."""
    if not weight.is_contiguous():
        return _sum_over_rows(rows, grad, ends, float8=float8).mT
    return _sum_over_rows(grad, rows, ends, float8=float8)


def _sum_over_rows(left: Tensor, right: Tensor, ends: Tensor, *, float8: bool) -> Tensor:
    """left.T @ right"""
    if not float8:
        return grouped_matmul(left.t(), right, ends)
    places = spread_ends(ends)
    one, other = (cast_grouped_columns(each, ends, places) for each in (left, right))
    return grouped_sum(*one, *other, places, left.dtype)
