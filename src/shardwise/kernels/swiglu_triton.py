"""The operators of `swiglu.py` after their matmul, and what kernels for float8 share with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def product(gate: Tensor, up: Tensor, linear: float = 1.0, cubic: float = 0.0) -> Tensor:
    made = torch.empty_like(up)
    count = up.numel()
    _product[(triton.cdiv(count, _BLOCK),)](
        gate, up, made, count, linear, cubic, BLOCK=_BLOCK, num_warps=8
    )
    return made


def gated_backward(
    gate: Tensor, up: Tensor, grad: Tensor, linear: float = 1.0, cubic: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The gradient of up, and the product. The gradient of gate overwrites the product's
    gradient."""
    up_grad, product = torch.empty_like(up), torch.empty_like(up)
    count = grad.numel()
    _gated_backward[(triton.cdiv(count, _BLOCK),)](
        gate, up, grad, up_grad, product, count, linear, cubic, BLOCK=_BLOCK, num_warps=8
    )
    return up_grad, product


@triton.jit
def sigmoid(x):
    # rsqrt is one instruction, and a division is ten. At the clock that matmuls leave to a GPU,
    # kernels that read three tensors wait for arithmetic too.
    root = tl.rsqrt(1 + tl.exp(-x))
    return root * root


@triton.jit
def _sigmoid_and_slope(g, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    # The sigmoid of a polynomial, and the polynomial's derivative.
    if CUBIC == 0:
        s = sigmoid(LINEAR * g)
        slope = tl.full(g.shape, LINEAR, tl.float32)
    else:
        s = sigmoid(g * (LINEAR + CUBIC * g * g))
        slope = LINEAR + 3 * CUBIC * g * g
    return s, slope


@triton.jit
def grads_and_product(g, u, d, LINEAR: tl.constexpr = 1.0, CUBIC: tl.constexpr = 0.0):
    s, slope = _sigmoid_and_slope(g, LINEAR, CUBIC)
    active = g * s
    steep = active * slope
    return d * u * (s + steep - steep * s), d * active, active * u


@triton.jit
def _product(gate, up, made, count, LINEAR: tl.constexpr, CUBIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    s, _ = _sigmoid_and_slope(g, LINEAR, CUBIC)
    tl.store(made + at, g * s * u, mask=inside)


@triton.jit
def _gated_backward(
    gate,
    up,
    grad,
    up_grad,
    product,
    count,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(grad + at, mask=inside).to(tl.float32)
    for_gate, for_up, made = grads_and_product(g, u, d, LINEAR, CUBIC)
    tl.store(grad + at, for_gate, mask=inside)
    tl.store(up_grad + at, for_up, mask=inside)
    tl.store(product + at, made, mask=inside)
