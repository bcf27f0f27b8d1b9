"""The operators of `float8_rows.py` on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.facts.float8_size import width_of
from shardwise.kernels.float8 import BACKWARD, FORWARD
from shardwise.kernels.float8_triton import float8_bits, largest, tile

_PIECE = 2048
_STEPS = 256
_ROWS, _COLUMNS = 64, 128


def steps_of(packed: Tensor) -> Tensor:
    made = packed.new_empty(packed.shape[:-1], dtype=torch.float32)
    width = width_of(packed.shape[-1])
    if made.numel():
        _steps_of[(triton.cdiv(made.numel(), _STEPS),)](
            _bytes(packed), made, made.numel(), packed.shape[-1], width, STEPS=_STEPS, num_warps=4
        )
    return made


def floats_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    num_bytes = packed.shape[-1]
    width = width_of(num_bytes)
    made = packed.new_empty(*packed.shape[:-1], width, dtype=dtype)
    rows = made.numel() // width
    if rows:
        grid = (rows, triton.cdiv(width, _PIECE))
        _floats_of[grid](_bytes(packed), made, num_bytes, width, PIECE=_PIECE, num_warps=4)
    return made


def turned(packed: Tensor) -> Tensor:
    """The codes of a matrix, transposed."""
    height, num_bytes = packed.shape
    width = width_of(num_bytes)
    columns = packed.new_empty(width, height, dtype=FORWARD)
    grid = triton.cdiv(height, _ROWS), triton.cdiv(width, _COLUMNS)
    _turn[grid](
        _bytes(packed), columns.view(torch.uint8), height, width, num_bytes,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return columns


def cast_columns(grad: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    # Two kernels and nothing else: the host would be slower than the GPU.
    height, width = grad.shape
    grid = triton.cdiv(height, _ROWS), triton.cdiv(width, _COLUMNS)
    amax = torch.zeros((), dtype=torch.int32, device=grad.device)
    made, by = torch.empty_like(grad, dtype=BACKWARD), steps.new_empty(())
    shape = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 4}
    _amax_columns[grid](grad, steps, amax, height, width, **shape)
    _cast_columns[grid](
        grad, steps, amax, by, made.view(torch.uint8), height, width, _least(), _most(), **shape
    )
    return made, by


@cache
def _least() -> int:
    # Imported here: it would import this module in a circle.
    from shardwise.kernels.float8_rows import LEAST, bits_of

    return bits_of(LEAST)


@cache
def _most() -> int:
    from shardwise.kernels.float8_rows import bits_of

    return bits_of(torch.finfo(BACKWARD).max)


def _bytes(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.uint8)


@triton.jit
def _power(exponent):
    # The bits of a float that is a power of two are its exponent alone.
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def number_of(code):
    """The e4m3 number of these eight bits."""
    # The same digits in fp16 are the number divided by 256, subnormal ones too. Not every GPU that
    # may read such weights has the format itself.
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _steps_of(packed, made, count, num_bytes, width, STEPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * STEPS + tl.arange(0, STEPS)
    exponent = tl.load(packed + row * num_bytes + width, mask=row < count, other=0)
    tl.store(made + row, _power(exponent), mask=row < count)


@triton.jit
def _floats_of(packed, made, num_bytes, width, PIECE: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < width
    code = tl.load(packed + row * num_bytes + at, mask=inside, other=0).to(tl.int32)
    value = number_of(code)
    value *= _power(tl.load(packed + row * num_bytes + width))
    tl.store(made + row * width + at, value.to(made.dtype.element_ty), mask=inside)


@triton.jit
def _turn(packed, columns, height, width, num_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    read = tl.load(packed + row[:, None] * num_bytes + column[None, :], mask=inside)
    within = (column < width)[:, None] & (row < height)[None, :]
    tl.store(columns + column[:, None] * height + row[None, :], tl.trans(read), mask=within)


@triton.jit
def _scaled(grad, steps, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, inside, _, _ = tile(height, width, ROWS, COLUMNS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.load(steps + column, mask=column < width, other=0.0)
    read = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    return read * step[None, :], at, inside


@triton.jit
def _amax_columns(
    grad, steps, amax, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    scaled, _, _ = _scaled(grad, steps, height, width, ROWS, COLUMNS)
    found = largest(tl.reshape(scaled, (ROWS * COLUMNS,)))
    # The bits of positive floats are ordered as the floats are, and NaN is above all of them.
    tl.atomic_max(amax, found.to(tl.int32, bitcast=True))


@triton.jit
def _cast_columns(
    grad, steps, amax, by, made, height, width, least, most,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    scaled, at, inside = _scaled(grad, steps, height, width, ROWS, COLUMNS)
    bits = tl.load(amax)
    # As in `power_scale`.
    exponent = ((tl.maximum(bits, least) - most - 1) >> 23) + 1
    scale = tl.where(bits < 0x7F800000, (127 - exponent) << 23, 0x7FC00000)
    scale = scale.to(tl.int32).to(tl.float32, bitcast=True)
    cast = float8_bits(scaled, scale, 57344.0, tl.float8e5)
    tl.store(made + at, cast, mask=inside)
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store(by, _power(127 + exponent), mask=is_first)
