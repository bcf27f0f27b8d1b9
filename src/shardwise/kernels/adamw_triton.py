"""`adamw.update` of one parameter on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def launch(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    known: Tensor,
    numbers: Sequence[float],
    index: int,
) -> None:
    count = param.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        tensors = (param, grad, mean, square, known)
        rate, beta1, beta2, eps, decay = numbers
        # The host computes differences from one in double precision. In the kernel's fp32 they
        # would keep few digits.
        by = (rate, 1 - beta1, beta2, 1 - beta2, eps, 1 - rate * decay)
        rounds = mean.dtype == torch.bfloat16
        _update[grid](*tensors, count, index, *by, ROUNDS=rounds, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _update(
    param, grad, mean, square, known, count, index,
    rate, share1, beta2, share2, eps, kept,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(known) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + at, mask=inside) / tl.load(known + 1)
        m = tl.load(mean + at, mask=inside).to(tl.float32)
        v = tl.load(square + at, mask=inside).to(tl.float32)
        m = m + (g - m) * share1
        v = v * beta2 + g * g * share2
        p = tl.load(param + at, mask=inside) * kept
        p = p - rate / tl.load(known + 2) * m / (tl.sqrt(v / tl.load(known + 3)) + eps)
        tl.store(param + at, p, mask=inside)
        if ROUNDS:
            chance = _chance(at, tl.load(known + 4).to(tl.int64), index)
            m = _rounded(m, chance & 0xFFFF)
            v = _rounded(v, chance >> 16)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)


@triton.jit
def _chance(at, count, index):
    # In 64 bits and cut, as the reference does it.
    bits = (at * 0x9E3779B1 + (count + index * 65537) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(x, chance):
    whole = (x.to(tl.int32, bitcast=True) + chance.to(tl.int32)) & -0x10000
    return whole.to(tl.float32, bitcast=True).to(tl.bfloat16)
