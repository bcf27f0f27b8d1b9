"""One tensor's part of `chunk_cat.chunk_cat` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def launch(tensor: Tensor, out: Tensor, chunk: int, offset: int) -> None:
    """Chunk i of `tensor` to row i of `out`, from `offset` on."""
    num_chunks, width = out.shape
    grid = (triton.cdiv(chunk, _BLOCK), num_chunks)
    _copy[grid](tensor, out, tensor.numel(), chunk, width, offset, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _copy(tensor, out, count, chunk, width, offset, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside, read = at < chunk, row * chunk + at
    # Beyond the last row of a tensor that does not divide there is padding.
    values = tl.load(tensor + read, mask=inside & (read < count), other=0.0)
    tl.store(out + row * width + offset + at, values.to(out.dtype.element_ty), mask=inside)
