"""The operators of `float8.py` on a GPU. Matrices are contiguous, one program has one tile."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # a row of a transposed tile is then a whole line of the memory, 128 bytes
_BLOCK = 8192
_SHORT = 4096  # where two or three tensors are read at once
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
    _transpose[_tiles(x)](_bytes(x), _bytes(columns), *x.shape, TILE=_TILE, num_warps=8)
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
    gate_rows = torch.empty_like(gate, dtype=torch.float8_e5m2)
    up_rows = torch.empty_like(gate, dtype=torch.float8_e5m2)
    product = _turned(gate, torch.float8_e4m3fn)
    rows, columns = 32, 128
    grid = (triton.cdiv(gate.shape[0], rows), triton.cdiv(gate.shape[1], columns))
    _swiglu_grad_cast[grid](
        gate, up, grad, scales, _bytes(gate_rows), _bytes(up_rows), _bytes(product), *gate.shape,
        ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    # Turned by the kernel above, one byte in four of e5m2 came out wrong (Triton of torch 2.11).
    return gate_rows, transposed(gate_rows), up_rows, transposed(up_rows), product


def _turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _tiles(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], _TILE), triton.cdiv(x.shape[1], _TILE)


def _to(dtype: torch.dtype) -> dict[str, Any]:
    most = torch.finfo(dtype).max
    return {"FORMAT": _FORMATS[dtype], "MOST": most, "TILE": _TILE, "num_warps": 8}


@triton.jit
def _float8(x, scale, MOST: tl.constexpr, FORMAT: tl.constexpr):
    # What is not a number stays none: the norm of the gradients must show it.
    scaled = tl.maximum(x * scale, -MOST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, MOST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def _largest(x):
    # A comparison drops what is not a number; infinity makes the scale 0 and all products NaN.
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=0)


@triton.jit
def _amax(x, partial, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), _largest(read))


@triton.jit
def _cast(
    x, scale, rows, columns, height, width,
    BOTH: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = row[:, None] * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    made = _float8(tl.load(x + at, mask=inside).to(tl.float32), tl.load(scale), MOST, FORMAT)
    tl.store(rows + at, made, mask=inside)
    if BOTH:
        turned = column[:, None] * height + row[None, :]
        within = (column < width)[:, None] & (row < height)[None, :]
        tl.store(columns + turned, tl.trans(made), mask=within)


@triton.jit
def _transpose(x, columns, height, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < height)[:, None] & (column < width)[None, :]
    read = tl.load(x + row[:, None] * width + column[None, :], mask=inside)
    turned = column[:, None] * height + row[None, :]
    within = (column < width)[:, None] & (row < height)[None, :]
    tl.store(columns + turned, tl.trans(read), mask=within)


@triton.jit
def _swiglu_amax(gate, up, partial, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0), _largest(g * tl.sigmoid(g) * u))


@triton.jit
def _swiglu_cast(gate, up, scale, rows, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    made = _float8(g * tl.sigmoid(g) * u, tl.load(scale), 448.0, tl.float8e4nv)
    tl.store(rows + at, made, mask=at < count)


@triton.jit
def _swiglu_grad_amax(gate, up, grad, partial, count, blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(partial + tl.program_id(0), _largest(d * u * s * (1 + g * (1 - s))))
    tl.store(partial + blocks + tl.program_id(0), _largest(d * g * s))


@triton.jit
def _swiglu_grad_cast(
    gate, up, grad, scales, gate_rows, up_rows, product, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    turned = column[:, None] * height + row[None, :]
    within = (column < width)[:, None] & (row < height)[None, :]
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(grad + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    made = _float8(d * u * s * (1 + g * (1 - s)), tl.load(scales), 57344.0, tl.float8e5)
    tl.store(gate_rows + at, made, mask=inside)
    made = _float8(d * g * s, tl.load(scales + 1), 57344.0, tl.float8e5)
    tl.store(up_rows + at, made, mask=inside)
    made = _float8(g * s * u, tl.load(scales + 2), 448.0, tl.float8e4nv)
    tl.store(product + turned, tl.trans(made), mask=within)
