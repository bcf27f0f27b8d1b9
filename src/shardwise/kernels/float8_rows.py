"""Frozen weights in float8, which matmuls read as they are stored.

Each row has a scale of its own, which is a power of two. A float with another exponent is the same
float, so such a scale rounds nothing, and it can be applied on either side of a matmul: to the
columns of the result in forward, and to those of the gradient in backward. Inputs and gradients get
powers of two as well, one for each tensor, found anew each time. So the numbers hardly depend on
what else is in a batch. `facts/float8_size.py` has the layout of bytes.

The gradient of the input needs the weight with its rows along the sum. Backward transposes the
bytes: two bytes of traffic for each weight, where a second copy would be a second byte stored and
gathered.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from shardwise.facts.float8_size import row_bytes, width_of
from shardwise.internals.functions import scaled_matmul
from shardwise.kernels.float8 import BACKWARD, FORWARD, amax_of, cast
from shardwise.kernels.operators import on_gpu, operator

LEAST = 1e-12  # as for scales of other float8 tensors
_BIAS, _DIGITS = 127, 23  # of the exponent of fp32


def pack(rows: Tensor) -> Tensor:
    """Weights (…, width) as bytes (…, row_bytes(width))."""
    width = rows.shape[-1]
    floats = rows.float()
    scale, step = power_scale(floats.abs().amax(-1, keepdim=True), FORWARD)
    made = torch.zeros(*rows.shape[:-1], row_bytes(width), dtype=torch.int8, device=rows.device)
    made[..., :width] = (floats * scale).to(FORWARD).view(torch.int8)
    exponents = (step.view(torch.int32) >> _DIGITS).byte()
    made[..., width : width + 1] = exponents.view(torch.int8)
    return made


def power_scale(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The power of two that lets a tensor whose largest magnitude is `amax` fill the format, and
    its inverse. Where `amax` is not finite, the scale is NaN, so that what is scaled shows it."""
    bits = amax.float().clamp(min=LEAST).view(torch.int32)
    # Bits of floats are their logarithm, all but straight between powers of two. So this is the
    # quotient's exponent, rounded up, without a division, which GPUs round in other ways.
    exponent = ((bits - bits_of(torch.finfo(dtype).max) - 1) >> _DIGITS) + 1
    scale = ((_BIAS - exponent) << _DIGITS).view(torch.float32)
    step = ((_BIAS + exponent) << _DIGITS).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan), step


def bits_of(number: float) -> int:
    """Those of an fp32 number."""
    return int.from_bytes(struct.pack("<f", number), "little")


def codes_of(packed: Tensor) -> Tensor:
    """The float8 numbers of packed rows, where they are."""
    return packed[..., : width_of(packed.shape[-1])].view(FORWARD)


@operator("float8_steps")
def steps_of(packed: Tensor) -> Tensor:
    """What each row is multiplied by.

    This is an operator, so that the compiler computes it once. It would read a byte of every row
    for each token otherwise, and each from a cache line of its own.
    """
    exponents = packed[..., width_of(packed.shape[-1])].int() & 255
    return (exponents << _DIGITS).view(torch.float32)


@operator("float8_floats")
def floats_of(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """The weights of packed rows, where they are not multiplied as they are; `after` is as for
    NF4."""
    return (codes_of(packed).float() * steps_of(packed)[..., None]).to(dtype)


@operator("float8_row_product")
def product(x8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """x8 * by @ codes.T; the columns are still to be multiplied by the steps."""
    # A CPU has the format but not the arithmetic, so it computes the same numbers in fp32.
    return ((x8.float() * by) @ codes_of(packed).float().t()).to(dtype)


@operator("float8_cast_columns")
def cast_columns(grad: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient times the steps of its columns in float8, and what that is to be multiplied by."""
    scaled = grad.float() * steps
    scale, by = power_scale(scaled.abs().amax(), BACKWARD)
    most = torch.finfo(BACKWARD).max
    return (scaled * scale).clamp(-most, most).to(BACKWARD), by


@operator("float8_row_grad")
def input_grad(grad8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """grad8 * by @ codes."""
    return ((grad8.float() * by) @ codes_of(packed).float()).to(dtype)


@torch.compiler.allow_in_graph
class Float8Product(torch.autograd.Function):
    """x @ W.T in float8, where W is packed and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, after_attention: bool) -> Tensor:
        """The bytes are saved, and no input."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        # A compiled kernel, usually a norm, has just written other inputs, and can do this too.
        amax = amax_of(rows) if after_attention else rows.abs().amax()
        scale, by = power_scale(amax, FORWARD)
        steps = steps_of(packed)
        ctx.save_for_backward(packed, steps)
        y = product(cast(rows, scale, FORWARD), by, packed, x.dtype) * steps.to(x.dtype)
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        packed, steps = ctx.saved_tensors
        (grad,) = grads
        grad8, by = cast_columns(grad.reshape(-1, grad.shape[-1]).contiguous(), steps)
        x_grad = input_grad(grad8, by, packed, grad.dtype)
        return x_grad.reshape(*grad.shape[:-1], -1), None, None


# ---- what the compiler must know ------------------------------------------------------------


@register_fake(steps_of)
def _(packed: Tensor) -> Tensor:
    return packed.new_empty(packed.shape[:-1], dtype=torch.float32)


@register_fake(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], width_of(packed.shape[-1]), dtype=dtype)


@register_fake(product)
def _(x8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return x8.new_empty(x8.shape[0], packed.shape[0], dtype=dtype)


@register_fake(cast_columns)
def _(grad: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad, dtype=BACKWARD), grad.new_empty((), dtype=torch.float32)


@register_fake(input_grad)
def _(grad8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return grad8.new_empty(grad8.shape[0], width_of(packed.shape[-1]), dtype=dtype)


# ---- on a GPU ---------------------------------------------------------------------------------
# The Triton kernels are imported where a GPU needs them.


@on_gpu(steps_of)
def _(packed: Tensor) -> Tensor:
    from shardwise.kernels import float8_rows_triton

    return float8_rows_triton.steps_of(packed)


@on_gpu(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    from shardwise.kernels import float8_rows_triton

    return float8_rows_triton.floats_of(packed, dtype)


@on_gpu(product)
def _(x8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_matmul(x8, codes_of(packed).t(), (by, torch.ones_like(by)), dtype, fast=True)


@on_gpu(cast_columns)
def _(grad: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    from shardwise.kernels import float8_rows_triton

    return float8_rows_triton.cast_columns(grad, steps)


@on_gpu(input_grad)
def _(grad8: Tensor, by: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    from shardwise.kernels import float8_rows_triton

    columns = float8_rows_triton.turned(packed)
    # As for other gradients, sums are kept in all bits.
    return scaled_matmul(grad8, columns.t(), (by, torch.ones_like(by)), dtype, fast=False)
