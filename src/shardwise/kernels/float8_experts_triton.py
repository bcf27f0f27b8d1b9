"""The casts of `float8_experts.py` on a GPU. A program reads its numbers twice: for the largest
magnitude, and to cast them."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.float8 import FORWARD
from shardwise.kernels.float8_triton import float8_bits

_BLOCK = 2048
_ROWS, _COLUMNS = 64, 64


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=FORWARD)
    steps = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if steps.numel():
        _cast_rows[(steps.numel(),)](
            x, codes.view(torch.uint8), steps, *_bounds(),
            WIDTH=x.shape[-1], BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return codes, steps


def cast_turned(stack: Tensor) -> tuple[Tensor, Tensor]:
    count, height, width = stack.shape
    codes = stack.new_empty(count, width, height, dtype=FORWARD)
    steps = stack.new_empty(count, width, dtype=torch.float32)
    _cast_columns[(count, triton.cdiv(width, _COLUMNS))](
        stack, steps, steps, codes.view(torch.uint8), steps, height, width, height, *_bounds(),
        GROUPED=False, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return codes, steps


def cast_grouped_columns(
    rows: Tensor, ends: Tensor, places: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    height, width = rows.shape
    codes = rows.new_empty(width, room, dtype=FORWARD)
    steps = rows.new_empty(len(ends) * width, dtype=torch.float32)
    _cast_columns[(len(ends), triton.cdiv(width, _COLUMNS))](
        rows, ends, places, codes.view(torch.uint8), steps, height, width, room, *_bounds(),
        GROUPED=True, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return codes, steps


@cache
def _bounds() -> tuple[int, int]:
    """Bits of the least magnitude that scales are made of, and of the largest number."""
    # Imported here: it would import Triton where there is none.
    from shardwise.kernels.float8_rows import LEAST, bits_of

    return bits_of(LEAST), bits_of(torch.finfo(FORWARD).max)


@triton.jit
def _scale(bits, least, most):
    # As in `power_scale`: the scale and its inverse.
    exponent = ((tl.maximum(bits, least) - most - 1) >> 23) + 1
    scale = tl.where(bits < 0x7F800000, (127 - exponent) << 23, 0x7FC00000)
    step = (127 + exponent) << 23
    return (
        scale.to(tl.int32).to(tl.float32, bitcast=True),
        step.to(tl.int32).to(tl.float32, bitcast=True),
    )


@triton.jit
def _magnitude(x):
    # The bits of positive floats are ordered as the floats are, and NaN is above all of them.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _cast_rows(x, codes, steps, least, most, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        read = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        found = tl.maximum(found, _magnitude(read))
    scale, step = _scale(tl.max(found, axis=0), least, most)
    tl.store(steps + row, step)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        read = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        made = float8_bits(read, scale, 448.0, tl.float8e4nv)
        tl.store(codes + row * WIDTH + at, made, mask=at < WIDTH)


@triton.jit
def _cast_columns(
    x, ends, places, codes, steps, height, width, room, least, most,
    GROUPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if GROUPED:
        start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
        end = tl.load(ends + group).to(tl.int64)
        place = tl.load(places + group - 1, mask=group > 0, other=0).to(tl.int64)
        last = tl.load(places + group).to(tl.int64)
    else:
        start = group * height
        end = start + height
        place = group * height * width
        last = place + height
    found = tl.zeros((COLUMNS,), dtype=tl.int32)
    first = start
    while first < end:
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        read = tl.load(x + row[:, None] * width + column[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.max(_magnitude(read.to(tl.float32)), axis=0))
        first += ROWS
    scale, step = _scale(found, least, most)
    tl.store(steps + group * width + column, step, mask=inside)
    first = start
    to = place
    # Past the last row is room, which gets zeros.
    while to < last:
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        read = tl.load(x + row[:, None] * width + column[None, :], mask=mask, other=0.0)
        made = float8_bits(read.to(tl.float32), scale[None, :], 448.0, tl.float8e4nv)
        at = to + tl.arange(0, ROWS)
        target = column.to(tl.int64)[:, None] * room + at[None, :]
        tl.store(codes + target, tl.trans(made), mask=inside[:, None] & (at < last)[None, :])
        first += ROWS
        to += ROWS
