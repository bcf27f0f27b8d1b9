"""The arithmetic of float8 layers with one scale for each tensor: forward, and both gradients.

It replaces torchao's own, which leaves the casts to the compiler; `kernels/float8.py` says what
that costs. Weights stay torchao's: all-gathered in float8 with their scale, or all-gathered in bf16
and cast here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.internals.functions import scaled_matmul
from shardwise.kernels.float8 import (
    BACKWARD,
    FORWARD,
    amax_of,
    cast,
    cast_both,
    scale_of,
    swiglu_amax,
    swiglu_cast,
    swiglu_grad_amax,
    swiglu_grad_cast,
    transposed,
)


@torch.compiler.allow_in_graph
class Linear(torch.autograd.Function):
    """x @ weight.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, after_attention: bool) -> Tensor:
        """The input is saved transposed in float8, if the weight needs a gradient."""
        largest = amax_of if after_attention else _amax_on_the_way
        x8, x8_columns, x_scale = _cast_input(x, largest, keep=ctx.needs_input_grad[1])
        w8, w_scale = _cast_weight(weight)
        ctx.save_for_backward(x8_columns, x_scale, weight, w_scale)
        ctx.dtype = x.dtype
        return _product(x8, x_scale, w8, w_scale, x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input, and of the weight if it needs one."""
        x8_columns, x_scale, weight, w_scale = ctx.saved_tensors
        (grad,) = grads
        rows, columns, scale = _cast_gradient(grad)
        x_grad = _product(rows, scale, _turned_weight(weight, w_scale, rows), w_scale, ctx.dtype)
        w_grad = None
        if x8_columns is not None:
            w_grad = _product(columns, scale, x8_columns, x_scale, ctx.dtype)
        return x_grad.reshape(*grad.shape[:-1], -1), w_grad, None


@torch.compiler.allow_in_graph
class Float8GatedMLP(torch.autograd.Function):
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The product of the two halves is not saved, because backward recomputes it."""
        learns = any(ctx.needs_input_grad[1:3])
        x8, x8_columns, x_scale = _cast_input(x, _amax_on_the_way, keep=learns)
        gate8, gate_scale = _cast_weight(gate)
        up8, up_scale = _cast_weight(up)
        down8, down_scale = _cast_weight(down)
        g = _product(x8, x_scale, gate8, gate_scale, x.dtype)
        u = _product(x8, x_scale, up8, up_scale, x.dtype)
        scale = scale_of(swiglu_amax(g, u), FORWARD)
        y = _product(swiglu_cast(g, u, scale), scale, down8, down_scale, x.dtype)
        ctx.save_for_backward(
            x8_columns, x_scale, g, u, scale, gate, gate_scale, up, up_scale, down, down_scale
        )
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input, and of the weights that need one."""
        (x8_columns, x_scale, g, u, scale, gate, gate_scale, up, up_scale, down, down_scale) = (
            ctx.saved_tensors
        )
        (grad,) = grads
        rows, columns, grad_scale = _cast_gradient(grad)
        down_turned = _turned_weight(down, down_scale, rows)
        inner = _product(rows, grad_scale, down_turned, down_scale, g.dtype)
        scales = scale_of(swiglu_grad_amax(g, u, inner), BACKWARD)
        g8, g8_columns, u8, u8_columns, product = swiglu_grad_cast(
            g, u, inner, torch.cat([scales, scale[None]])
        )
        x_grad = _product(g8, scales[0], _turned_weight(gate, gate_scale, g8), gate_scale, g.dtype)
        x_grad = x_grad + _product(
            u8, scales[1], _turned_weight(up, up_scale, u8), up_scale, g.dtype
        )
        _, gate_learns, up_learns, down_learns = ctx.needs_input_grad
        return (
            x_grad.reshape(*grad.shape[:-1], -1),
            _product(g8_columns, scales[0], x8_columns, x_scale, g.dtype) if gate_learns else None,
            _product(u8_columns, scales[1], x8_columns, x_scale, g.dtype) if up_learns else None,
            _product(columns, grad_scale, product, scale, g.dtype) if down_learns else None,
        )


def _amax_on_the_way(x: Tensor) -> Tensor:
    """The largest magnitude of what a compiled kernel has just written. That kernel, usually a
    norm, can compute it without another read."""
    return x.abs().amax()


def _cast_input(
    x: Tensor, largest: Callable[[Tensor], Tensor], *, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The input in float8, its transpose for backward, and the scale.

    Layers with the same input share both copies, because the compiler sees the same call.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    scale = scale_of(largest(rows), FORWARD)
    if not keep:
        return cast(rows, scale, FORWARD), None, scale
    return *cast_both(rows, scale, FORWARD), scale


def _cast_gradient(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = grad.reshape(-1, grad.shape[-1]).contiguous()
    scale = scale_of(amax_of(rows), BACKWARD)
    return *cast_both(rows, scale, BACKWARD), scale


def _cast_weight(weight: Any) -> tuple[Tensor, Tensor]:
    """The weight as it was all-gathered in float8, or cast now."""
    if hasattr(weight, "_scale"):
        return weight._data, weight._scale
    scale = scale_of(weight.abs().amax(), FORWARD)
    return cast(weight, scale, FORWARD), scale


def _turned_weight(weight: Any, scale: Tensor, after: Tensor) -> Tensor:
    rows = weight._data if hasattr(weight, "_scale") else cast(weight, scale, FORWARD)
    return transposed(rows, after)


def _product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left @ right.T. Gradients are accumulated exactly, as in torchao."""
    by, and_by = left_scale.reciprocal(), right_scale.reciprocal()
    if left.is_cpu:
        # A CPU has the format but not the arithmetic, so it computes the same numbers in fp32.
        return ((left.float() * by) @ (right.float() * and_by).t()).to(dtype)
    fast = left.dtype == FORWARD
    return scaled_matmul(left, right.t(), (by, and_by), dtype, fast=fast)
