"""One tensor's part of the copies of `unit_copies` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def copy_in(tensor: Tensor, out: Tensor, chunk: int, start: int) -> None:
    """Copy chunk i of `tensor` to row i of `out`, from column `start` on, with zeros beyond its
    end."""
    _launch(tensor, out, chunk, (chunk, 0), (out.shape[1], start), out.shape[0])


def copy_out(gathered: Tensor, tensor: Tensor, chunk: int, start: int) -> None:
    """Copy row i of `gathered`, from column `start` on, to chunk i of `tensor`."""
    _launch(gathered, tensor, chunk, (gathered.shape[1], start), (chunk, 0), gathered.shape[0])


def _launch(
    source: Tensor, to: Tensor, chunk: int, read: tuple[int, int], write: tuple[int, int], rows: int
) -> None:
    """Launch one copy. `read` and `write` are the width of a row, and where the chunk begins in
    it."""
    grid = (triton.cdiv(chunk, _BLOCK), rows)
    _copy[grid](source, to, source.numel(), chunk, *read, *write, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _copy(source, to, count, chunk, width, start, to_width, to_start, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside, read = at < chunk, row * width + start + at
    values = tl.load(source + read, mask=inside & (read < count), other=0)
    tl.store(to + row * to_width + to_start + at, values.to(to.dtype.element_ty), mask=inside)
