"""The operators of `experts.py` on a GPU. One program makes a piece of one row of the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.swiglu_triton import grads_and_product, sigmoid

_BLOCK = 1024
# A tile of rows that are summed for one expert.
_ROWS, _COLUMNS = 32, 128


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    return _summed(rows, places)


def sum_biased_rows(
    rows: Tensor, places: Tensor, bias: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    return _summed(rows, places, bias.contiguous(), experts.contiguous(), weights.contiguous())


def _summed(rows: Tensor, places: Tensor, *biased: Tensor) -> Tensor:
    """The rows of `places`, with bias, experts and weights where these are given."""
    width = rows.shape[1]
    made = rows.new_empty(len(places), width)
    _sum_rows[(len(places), triton.cdiv(width, _BLOCK))](
        rows, places, *(biased or (rows, rows, rows)), made, width,
        BIASED=bool(biased), COUNT=places.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return made


def sum_by_expert(rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    rows, width = rows.contiguous(), rows.shape[1]
    made = rows.new_empty(len(ends), width)
    _sum_by_expert[(len(ends), triton.cdiv(width, _COLUMNS))](
        rows, ends, rows if weights is None else weights, made, width,
        WEIGHTED=weights is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return made


def weighted_swiglu(halves: Tensor, weights: Tensor) -> Tensor:
    width = halves.shape[1] // 2
    made = halves.new_empty(len(halves), width)
    grid = (len(halves), triton.cdiv(width, _BLOCK))
    _weighted_swiglu[grid](halves, weights, made, width, BLOCK=_BLOCK, num_warps=4)
    return made


def weighted_swiglu_backward(
    grad: Tensor, halves: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    width = grad.shape[1]
    both, product, d_weights = map(torch.empty_like, (halves, grad, weights))
    _weighted_swiglu_backward[(len(grad),)](
        grad, halves, weights, both, product, d_weights, WIDTH=width, BLOCK=_BLOCK, num_warps=4
    )
    return both, product, d_weights


@triton.jit
def _sum_rows(
    rows, places, bias, experts, weights, made, width,
    BIASED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(COUNT):
        row = tl.load(places + token * COUNT + index).to(tl.int64)
        total += tl.load(rows + row * width + at, mask=inside).to(tl.float32)
        if BIASED:
            expert = tl.load(experts + token * COUNT + index).to(tl.int64)
            weight = tl.load(weights + token * COUNT + index).to(tl.float32)
            total += weight * tl.load(bias + expert * width + at, mask=inside).to(tl.float32)
    tl.store(made + token * width + at, total, mask=inside)


@triton.jit
def _sum_by_expert(
    rows, ends, weights, made, width,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    while first < end:
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & inside[None]
        places = row.to(tl.int64)[:, None] * width + at[None]
        found = tl.load(rows + places, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            found *= tl.load(weights + row, mask=row < end, other=0.0).to(tl.float32)[:, None]
        total += found
        first += ROWS
    tl.store(made + expert.to(tl.int64) * width + at, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _weighted_swiglu(halves, weights, made, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weights + row).to(tl.float32)
    g = tl.load(halves + row * 2 * width + at, mask=inside).to(tl.float32)
    u = tl.load(halves + row * 2 * width + width + at, mask=inside).to(tl.float32)
    tl.store(made + row * width + at, g * sigmoid(g) * u * weight, mask=inside)


@triton.jit
def _weighted_swiglu_backward(
    grad, halves, weights, both, product, d_weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < WIDTH
        g = tl.load(halves + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(halves + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        for_gate, for_up, made = grads_and_product(g, u, d * weight)
        tl.store(both + row * 2 * WIDTH + at, for_gate, mask=inside)
        tl.store(both + row * 2 * WIDTH + WIDTH + at, for_up, mask=inside)
        tl.store(product + row * WIDTH + at, made * weight, mask=inside)
        along += d * made
    tl.store(d_weights + row, tl.sum(along, axis=0))
