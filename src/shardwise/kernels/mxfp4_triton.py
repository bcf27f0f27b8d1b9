"""The operator of `mxfp4.py` on a GPU: one program makes the weights of one piece of a row."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.facts.mxfp4_size import BLOCK, width_of
from shardwise.kernels.mxfp4 import E2M1

# Those of NF4's kernel; not measured for this one.
_BYTES, _WARPS = 2048, 2


def floats_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    rows = packed.contiguous().view(torch.uint8)
    num_bytes = rows.shape[-1]
    width = width_of(num_bytes)
    made = packed.new_empty(*packed.shape[:-1], width, dtype=dtype)
    count = made.numel() // width
    if count:
        grid = (count, triton.cdiv(width // 2, _BYTES))
        _floats_of[grid](
            rows, _book(packed.device), made, num_bytes, width,
            BYTES=_BYTES, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return made


@cache
def _book(device: torch.device) -> Tensor:
    return torch.tensor(E2M1, device=device)


@triton.jit
def _floats_of(packed, book, made, num_bytes, width, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * BYTES + tl.arange(0, BYTES)
    inside = at < width // 2
    bytes_of = packed + row * num_bytes
    pairs = tl.load(bytes_of + at, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(bytes_of + width // 2 + at * 2 // BLOCK, mask=inside, other=0)
    scale = _power(exponent.to(tl.int32))
    first = tl.load(book + (pairs & 15)) * scale
    second = tl.load(book + (pairs >> 4)) * scale
    both = tl.interleave(first, second)
    to = piece * BYTES * 2 + tl.arange(0, BYTES * 2)
    tl.store(made + row * width + to, both.to(made.dtype.element_ty), mask=to < width)


@triton.jit
def _power(exponent):
    # The bits of a power of two are its exponent alone, but the smallest is subnormal, and the
    # largest stands for NaN.
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)
