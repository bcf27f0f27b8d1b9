"""A pass over the rows that this rank's experts have received, which saves the rows and the halves
of SwiGLU alone.

The weights of rows are applied where rows are narrow, so that what comes out of the last matmul is
needed for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.clamped_swiglu import (
    weighted_clamped_swiglu,
    weighted_clamped_swiglu_backward,
)
from shardwise.kernels.experts import sum_by_expert, weighted_swiglu, weighted_swiglu_backward
from shardwise.parallel.grouped_products import product, row_grad, weight_grad


class ReceivedRows(torch.autograd.Function):
    """For each row, what its expert makes of it, times the row's weight.

    Rows are sorted by expert, and those of expert e end at ends[e]. Weights of experts are
    (experts, out, in), as they lie in memory or as a view. After them comes whether they multiply
    in float8. SwiGLU is plain, or it is clamped where two biases, `alpha` and `limit` follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        shares: Tensor,
        experts: Tensor,
        ends: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *how: Any,
    ) -> Tensor:
        """Two matmuls, and SwiGLU between them."""
        ctx.float8, *clamped = how
        float8 = ctx.float8
        both = product(rows, gate_up, ends, float8=float8)
        saved = (rows, both, shares, experts, ends, gate_up, down)
        if not clamped:
            ctx.save_for_backward(*saved)
            return product(weighted_swiglu(both, shares), down, ends, float8=float8)
        bias, down_bias, *ctx.clamp = clamped
        ctx.save_for_backward(*saved, bias, down_bias)
        made = weighted_clamped_swiglu(both, shares, bias, experts, *ctx.clamp)
        added = shares.float()[:, None] * down_bias[experts.int()].float()
        return (product(made, down, ends, float8=float8).float() + added).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of rows and their weights, and of the experts that learn."""
        rows, both, shares, experts, ends, gate_up, down, *biases = ctx.saved_tensors
        gate_up_learns, down_learns, _, *biases_learn = ctx.needs_input_grad[4:]
        grad, float8 = grads[0].contiguous(), ctx.float8
        d_made = row_grad(grad, down, ends, float8=float8)
        d_biases: list[Tensor | None] = []
        if biases:
            bias, down_bias = biases
            d_both, made, d_shares = weighted_clamped_swiglu_backward(
                d_made, both, shares, bias, experts, *ctx.clamp
            )
            by_bias = (grad.float() * down_bias[experts.int()].float()).sum(1)
            d_shares = (d_shares.float() + by_bias).to(shares.dtype)
            d_biases = [sum_by_expert(d_both, ends) if biases_learn[0] else None]
            d_biases += [sum_by_expert(grad, ends, shares) if biases_learn[1] else None, None, None]
        else:
            d_both, made, d_shares = weighted_swiglu_backward(d_made, both, shares)
        return (
            row_grad(d_both, gate_up, ends, float8=float8),
            d_shares,
            None,
            None,
            weight_grad(gate_up, d_both, rows, ends, float8=float8) if gate_up_learns else None,
            weight_grad(down, grad, made, ends, float8=float8) if down_learns else None,
            None,
            *d_biases,
        )
