"""torch's grouped matmul, in formats that the compiler does not take.

`grouped_mm` multiplies fp32 and fp16 as well as bf16, but the function by which the compiler learns
the result's shape refuses all but bf16. So other formats go through an operator of ours, which
calls the same kernels and has such a function of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import grouped_mm


def grouped_matmul(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Rows (rows, in) times weights (experts, in, out), where those of expert e end at ends[e]; or
    (out, rows) times (rows, in), as (experts, out, in)."""
    if left.dtype == torch.bfloat16:
        return grouped_mm(left, right, offs=ends)
    made: Tensor = any_grouped_mm(left, right, ends)
    return made


@custom_op("shardwise::any_grouped_mm", mutates_args=())
def any_grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm`, whose result is contiguous on every device."""
    return grouped_mm(left, right, offs=ends).contiguous()


@any_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    sides = left.shape[0], right.shape[-1]
    return left.new_empty(sides if right.dim() == 3 else (len(ends), *sides))


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    left, right, ends = inputs
    left_learns, right_learns, *_ = ctx.needs_input_grad
    ctx.save_for_backward(left if right_learns else None, right if left_learns else None, ends)
    ctx.is_turned = not right.is_contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """The gradients of rows and weights; those of weights lie in memory as the weights do, as
    torch's own."""
    left, right, ends = ctx.saved_tensors
    d_left = None if right is None else grouped_matmul(grad, right.mT, ends)
    if left is None:
        return d_left, None, None
    if ctx.is_turned:
        return d_left, grouped_matmul(grad.t(), left, ends).mT, None
    return d_left, grouped_matmul(left.t(), grad, ends), None


any_grouped_mm.register_autograd(_backward, setup_context=_remember)
