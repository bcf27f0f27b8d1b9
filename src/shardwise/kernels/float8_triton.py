"""The operators of `float8.py` on a GPU. Matrices are contiguous, and one program computes one
tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.swiglu_triton import grads_and_product, sigmoid

_ROWS, _COLUMNS = 64, 128  # the tile of kernels that also write the transpose
_BLOCK = 8192
_SHORT = 4096  # for kernels that read two or three tensors
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def amax_of(x: Tensor) -> Tensor:
    partial = x.new_empty(triton.cdiv(x.numel(), _BLOCK), dtype=torch.float32)
    _amax[partial.shape](x, partial, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return partial.amax()


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = torch.empty_like(x, dtype=dtype)
    _cast[_tiles(x)](x, scale, _bytes(rows), _bytes(rows), *x.shape, BOTH=False, **_to(dtype))
    return rows


def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = torch.empty_like(x, dtype=dtype), _turned(x, dtype)
    _cast[_tiles(x)](x, scale, _bytes(rows), _bytes(columns), *x.shape, BOTH=True, **_to(dtype))
    return rows, columns


def transposed(x: Tensor, after: Tensor | None = None) -> Tensor:
    columns = _turned(x, x.dtype)
    _transpose[_tiles(x)](
        _bytes(x), _bytes(columns), *x.shape, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
    )
    return columns


def swiglu_amax(gate: Tensor, up: Tensor) -> Tensor:
    partial = gate.new_empty(triton.cdiv(gate.numel(), _SHORT), dtype=torch.float32)
    _swiglu_amax[partial.shape](gate, up, partial, gate.numel(), BLOCK=_SHORT, num_warps=4)
    return partial.amax()


def swiglu_cast(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    rows = torch.empty_like(gate, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(gate.numel(), _BLOCK),)
    _swiglu_cast[grid](gate, up, scale, _bytes(rows), gate.numel(), BLOCK=_BLOCK, num_warps=8)
    return rows


def swiglu_grad_amax(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    count = triton.cdiv(gate.numel(), _SHORT)
    partial = gate.new_empty(2, count, dtype=torch.float32)
    _swiglu_grad_amax[(count,)](
        gate, up, grad, partial, gate.numel(), count, BLOCK=_SHORT, num_warps=4
    )
    return partial.amax(1)


def swiglu_grad_cast(
    gate: Tensor, up: Tensor, grad: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float8_e5m2
    gate_rows, gate_columns = torch.empty_like(gate, dtype=dtype), _turned(gate, dtype)
    up_rows, up_columns = torch.empty_like(gate, dtype=dtype), _turned(gate, dtype)
    made = gate_rows, gate_columns, up_rows, up_columns, _turned(gate, torch.float8_e4m3fn)
    rows, columns = 32, 128
    grid = (triton.cdiv(gate.shape[0], rows), triton.cdiv(gate.shape[1], columns))
    _swiglu_grad_cast[grid](
        gate, up, grad, scales, *map(_bytes, made), *gate.shape,
        ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return made


def _turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _tiles(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], _ROWS), triton.cdiv(x.shape[1], _COLUMNS)


def _to(dtype: torch.dtype) -> dict[str, Any]:
    made = {"FORMAT": _FORMATS[dtype], "MOST": torch.finfo(dtype).max}
    return {**made, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 4}


@triton.jit
def tile(height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Where this program's numbers are, and where they are in the transposed matrix.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    turned = column[:, None] * height + row[None, :]
    within = (column < width)[:, None] & (row < height)[None, :]
    return at, inside, turned, within


@triton.jit
def float8_bits(x, scale, MOST: tl.constexpr, FORMAT: tl.constexpr):
    # NaN stays NaN, because the norm of the gradients must show it.
    scaled = tl.maximum(x * scale, -MOST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, MOST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def largest(x):
    # The bits of positive floats are ordered as the floats are, and NaN is above all of them.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _amax(x, partial, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), largest(read))


@triton.jit
def _cast(
    x, scale, rows, columns, height, width,
    BOTH: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, turned, within = tile(height, width, ROWS, COLUMNS)
    made = float8_bits(tl.load(x + at, mask=inside).to(tl.float32), tl.load(scale), MOST, FORMAT)
    tl.store(rows + at, made, mask=inside)
    if BOTH:
        tl.store(columns + turned, tl.trans(made), mask=within)


@triton.jit
def _transpose(x, columns, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, inside, turned, within = tile(height, width, ROWS, COLUMNS)
    tl.store(columns + turned, tl.trans(tl.load(x + at, mask=inside)), mask=within)


@triton.jit
def _swiglu_amax(gate, up, partial, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), largest(g * sigmoid(g) * u))


@triton.jit
def _swiglu_cast(gate, up, scale, rows, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    made = float8_bits(g * sigmoid(g) * u, tl.load(scale), 448.0, tl.float8e4nv)
    tl.store(rows + at, made, mask=at < count)


@triton.jit
def _swiglu_grad_amax(gate, up, grad, partial, count, blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    gate_grad, up_grad, _ = grads_and_product(g, u, d)
    tl.store(partial + tl.program_id(0), largest(gate_grad))
    tl.store(partial + blocks + tl.program_id(0), largest(up_grad))


@triton.jit
def _e5m2(x, scale):
    # Each copy loads the scale again, so that the compiler casts it with instructions of its own.
    # The assembler of CUDA 12.8 packs a cast that rows and columns share for one of them, and then
    # reads wrong bytes for the other.
    return float8_bits(x, tl.load(scale), 57344.0, tl.float8e5)


@triton.jit
def _swiglu_grad_cast(
    gate, up, grad, scales, gate_rows, gate_columns, up_rows, up_columns, product, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, turned, within = tile(height, width, ROWS, COLUMNS)
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(grad + at, mask=inside).to(tl.float32)
    gate_grad, up_grad, made = grads_and_product(g, u, d)
    tl.store(gate_rows + at, _e5m2(gate_grad, scales), mask=inside)
    tl.store(gate_columns + turned, _e5m2(tl.trans(gate_grad), scales), mask=within)
    tl.store(up_rows + at, _e5m2(up_grad, scales + 1), mask=inside)
    tl.store(up_columns + turned, _e5m2(tl.trans(up_grad), scales + 1), mask=within)
    made = float8_bits(made, tl.load(scales + 2), 448.0, tl.float8e4nv)
    tl.store(product + turned, tl.trans(made), mask=within)
