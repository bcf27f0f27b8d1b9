"""The operators of `clamped_swiglu.py` on a GPU. One program makes a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.swiglu_triton import sigmoid

_BLOCK = 1024


def weighted_clamped_swiglu(
    pairs: Tensor, weights: Tensor, bias: Tensor, experts: Tensor, alpha: float, limit: float
) -> Tensor:
    width = pairs.shape[1] // 2
    made = pairs.new_empty(len(pairs), width)
    _forward[(len(pairs), triton.cdiv(width, _BLOCK))](
        pairs, weights, bias.contiguous(), experts, made, alpha, limit, width,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return made


def weighted_clamped_swiglu_backward(
    grad: Tensor,
    pairs: Tensor,
    weights: Tensor,
    bias: Tensor,
    experts: Tensor,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    d_pairs, product, d_weights = map(torch.empty_like, (pairs, grad, weights))
    _backward[(len(grad),)](
        grad, pairs, weights, bias.contiguous(), experts, d_pairs, product, d_weights, alpha, limit,
        WIDTH=grad.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return d_pairs, product, d_weights


@triton.jit
def _biased(pairs, bias, row, expert, start, width, BLOCK: tl.constexpr):
    """(gate, up) of BLOCK pairs that begin with pair `start`, before they are clamped.

    Gate and up are neighbours in memory, so they are read together and parted then.
    """
    at = 2 * start + tl.arange(0, 2 * BLOCK)
    inside = at < 2 * width
    found = tl.load(pairs + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(bias + expert * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(found, (BLOCK, 2)))


@triton.jit
def _clamped(gate, up, limit):
    # Comparisons keep what is no number, which the minimum and the maximum of a GPU would hide.
    least = tl.where(up < -limit, -limit, up)
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, least)


@triton.jit
def _forward(pairs, weights, bias, experts, made, alpha, limit, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    start = tl.program_id(1) * BLOCK
    gate, up = _biased(pairs, bias, row, expert, start, width, BLOCK)
    g, u = _clamped(gate, up, limit)
    at = start + tl.arange(0, BLOCK)
    tl.store(made + row * width + at, g * sigmoid(alpha * g) * (u + 1) * weight, mask=at < width)


@triton.jit
def _backward(
    grad, pairs, weights, bias, experts, d_pairs, product, d_weights, alpha, limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < WIDTH
        gate, up = _biased(pairs, bias, row, expert, start, WIDTH, BLOCK)
        g, u = _clamped(gate, up, limit)
        d = tl.load(grad + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(alpha * g)
        swish = g * s
        made = swish * (u + 1)
        # A number beyond its limit has no gradient.
        for_gate = tl.where(gate > limit, 0.0, d * weight * (u + 1) * (s + alpha * swish * (1 - s)))
        for_up = tl.where(tl.abs(up) > limit, 0.0, d * weight * swish)
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        joined = tl.interleave(for_gate, for_up)
        tl.store(d_pairs + row * 2 * WIDTH + both, joined, mask=both < 2 * WIDTH)
        tl.store(product + row * WIDTH + at, made * weight, mask=inside)
        along += d * made
    tl.store(d_weights + row, tl.sum(along, axis=0))
