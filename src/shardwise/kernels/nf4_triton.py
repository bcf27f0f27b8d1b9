"""The operator of `nf4.py` on a GPU: one program makes the weights of one piece of a row."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.facts.nf4_size import BLOCK, width_of
from shardwise.kernels.nf4 import CODE_BOOK

# Of the sizes that were tried on an H200, 512 to 4096 with two to eight warps, the fastest.
_BYTES, _WARPS = 2048, 2


def floats_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    num_bytes = packed.shape[-1]
    width = width_of(num_bytes)
    made = packed.new_empty(*packed.shape[:-1], width, dtype=dtype)
    rows = made.numel() // width
    grid = (rows, triton.cdiv(width // 2, _BYTES))
    if rows:
        packed = packed.contiguous()
        _floats_of[grid](
            packed, packed.view(torch.float32), _book(packed.device), made, num_bytes, width,
            BYTES=_BYTES, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return made


@cache
def _book(device: torch.device) -> Tensor:
    """The sixteen values fill half of a cache line, so a warp reads them at once."""
    return torch.tensor(CODE_BOOK, device=device)


@triton.jit
def _floats_of(
    packed,
    steps,
    book,
    made,
    num_bytes,
    width,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * BYTES + tl.arange(0, BYTES)
    inside = at < width // 2
    bytes_of = packed + row * num_bytes
    pairs = tl.load(bytes_of + at, mask=inside, other=0).to(tl.int32)
    codes = tl.load(bytes_of + width // 2 + at * 2 // BLOCK, mask=inside, other=0)
    step = tl.load(steps + row * (num_bytes // 4) + num_bytes // 4 - 1)
    scale = codes.to(tl.float32) * step
    first = tl.load(book + (pairs >> 4)) * scale
    second = tl.load(book + (pairs & 15)) * scale
    both = tl.interleave(first, second)
    to = piece * BYTES * 2 + tl.arange(0, BYTES * 2)
    tl.store(made + row * width + to, both.to(made.dtype.element_ty), mask=to < width)
