"""The operator of `fp8_blocks.py` on a GPU: one program makes the weights of one piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.facts.fp8_block_size import BLOCK, width_of
from shardwise.kernels.float8_rows_triton import number_of

# Those of the kernel for float8 rows; not measured for this one.
_PIECE, _WARPS = 2048, 4


def floats_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    rows = packed.contiguous().view(torch.uint8)
    num_bytes = rows.shape[-1]
    width = width_of(num_bytes)
    made = packed.new_empty(*packed.shape[:-1], width, dtype=dtype)
    count = made.numel() // width
    if count:
        grid = (count, triton.cdiv(width, _PIECE))
        _floats_of[grid](
            rows, rows.view(torch.float32), made, num_bytes, width,
            PIECE=_PIECE, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return made


@triton.jit
def _floats_of(
    packed, scales, made, num_bytes, width, PIECE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < width
    code = tl.load(packed + row * num_bytes + at, mask=inside, other=0).to(tl.int32)
    place = row * (num_bytes // 4) + width // 4 + at // BLOCK
    value = number_of(code) * tl.load(scales + place, mask=inside, other=0.0)
    tl.store(made + row * width + at, value.to(made.dtype.element_ty), mask=inside)
