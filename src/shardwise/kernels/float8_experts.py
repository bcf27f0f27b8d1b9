"""Casts and grouped matmuls of experts in float8, as operators: on a CPU in plain torch, on a GPU
in Triton and by torch's grouped matmul.

The numbers of a factor that are summed together share a scale, which is a power of two, so that it
rounds nothing. In forward and for the gradient of rows those are a row and a row of a weight. For
the gradient of weights they are a column of the rows of one expert.

All codes are e4m3, gradients too: torch's grouped matmul takes no other. Along a sum it wants
groups that begin at multiples of 16, and factors that are contiguous. So where a sum goes over the
rows of an expert, these are written transposed, each expert's at a place of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake
from torch.nn.functional import grouped_mm

from shardwise.kernels.float8 import FORWARD
from shardwise.kernels.float8_rows import power_scale
from shardwise.kernels.operators import on_gpu, operator

MULTIPLE = 16
"""Of both sides of a weight, and of the rows that an expert has room for."""


def room_for(num_rows: int, num_experts: int) -> int:
    """The most rows that experts may take, each with room for a multiple of 16, and one at least:
    a sum over no row is then a sum over zeros."""
    return (num_rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE + MULTIPLE * num_experts


def spread_ends(ends: Tensor) -> Tensor:
    """Where each expert's room ends."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    rooms = ((counts + MULTIPLE - 1) // MULTIPLE).clamp(min=1) * MULTIPLE
    return rooms.cumsum(0, dtype=torch.int32)


@operator("float8_cast_rows")
def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the same shape, and what each row is to be multiplied by. The last dim is a row."""
    floats = x.float()
    scale, steps = power_scale(floats.abs().amax(-1), FORWARD)
    return _codes(floats * scale[..., None]), steps


@operator("float8_cast_turned")
def cast_turned(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (experts, in, out) of weights (experts, out, in), and what each row of the codes is to
    be multiplied by."""
    return cast_rows(stack.mT.contiguous())


@operator("float8_cast_grouped_columns")
def cast_grouped_columns(rows: Tensor, ends: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (columns, room) of rows that are sorted by expert, and what each expert's part of a
    column (experts * columns) is to be multiplied by. `places` are where experts' room ends."""
    experts = _groups(ends, len(rows))
    floats = rows.float()
    amax = floats.new_zeros(len(ends), rows.shape[1])
    amax.scatter_reduce_(0, experts[:, None].expand_as(floats), floats.abs(), "amax")
    scale, steps = power_scale(amax, FORWARD)
    shift = torch.zeros_like(ends)
    shift[1:] = (places - ends)[:-1]
    made = floats.new_zeros(room_for(len(rows), len(ends)), rows.shape[1])
    made[torch.arange(len(rows), device=rows.device) + shift[experts]] = floats * scale[experts]
    return _codes(made).t().contiguous(), steps.flatten()


@operator("float8_grouped_mm")
def grouped_product(
    rows: Tensor,
    row_steps: Tensor,
    stack: Tensor,
    stack_steps: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """rows @ stack[e].T for the rows of each expert e; `fast`: sums are kept in fewer bits."""
    # A CPU has the format but not the arithmetic, so it computes the same numbers in fp32.
    left = rows.float() * row_steps[:, None]
    return grouped_mm(left, (stack.float() * stack_steps[..., None]).mT, offs=ends).to(dtype)


@operator("float8_grouped_mm_over_rows")
def grouped_sum(
    left: Tensor,
    left_steps: Tensor,
    right: Tensor,
    right_steps: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """left @ right.T over the room of each expert: (experts, left's rows, right's rows)."""
    experts = _groups(places, left.shape[1]).clamp(max=len(places) - 1)
    one, other = (
        codes.float() * steps.view(len(places), -1)[experts].t()
        for codes, steps in ((left, left_steps), (right, right_steps))
    )
    return grouped_mm(one, other.t(), offs=places).to(dtype)


def _codes(scaled: Tensor) -> Tensor:
    most = torch.finfo(FORWARD).max
    return scaled.clamp(-most, most).to(FORWARD)


def _groups(ends: Tensor, count: int) -> Tensor:
    """The group of each of `count` places."""
    places = torch.arange(count, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, places, right=True)


# ---- what the compiler must know ------------------------------------------------------------


def _steps_like(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


@register_fake(cast_rows)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FORWARD), _steps_like(x, *x.shape[:-1])


@register_fake(cast_turned)
def _(stack: Tensor) -> tuple[Tensor, Tensor]:
    count, out, inner = stack.shape
    return stack.new_empty(count, inner, out, dtype=FORWARD), _steps_like(stack, count, inner)


@register_fake(cast_grouped_columns)
def _(rows: Tensor, ends: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    height, width = rows.shape
    codes = rows.new_empty(width, room_for(height, len(ends)), dtype=FORWARD)
    return codes, _steps_like(rows, len(ends) * width)


@register_fake(grouped_product)
def _(
    rows: Tensor,
    row_steps: Tensor,
    stack: Tensor,
    stack_steps: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return rows.new_empty(len(rows), stack.shape[1], dtype=dtype)


@register_fake(grouped_sum)
def _(
    left: Tensor,
    left_steps: Tensor,
    right: Tensor,
    right_steps: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return left.new_empty(len(places), len(left), len(right), dtype=dtype)


# ---- on a GPU ---------------------------------------------------------------------------------
# The Triton kernels are imported where a GPU needs them.


@on_gpu(cast_rows)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    from shardwise.kernels import float8_experts_triton

    if x.dim() == 3 and x.mT.is_contiguous():
        return float8_experts_triton.cast_turned(x.mT)
    return float8_experts_triton.cast_rows(x.contiguous())


@on_gpu(cast_turned)
def _(stack: Tensor) -> tuple[Tensor, Tensor]:
    from shardwise.kernels import float8_experts_triton

    if stack.mT.is_contiguous():
        return float8_experts_triton.cast_rows(stack.mT)
    return float8_experts_triton.cast_turned(stack.contiguous())


@on_gpu(cast_grouped_columns)
def _(rows: Tensor, ends: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    from shardwise.kernels import float8_experts_triton

    room = room_for(len(rows), len(ends))
    return float8_experts_triton.cast_grouped_columns(rows.contiguous(), ends, places, room)


@on_gpu(grouped_product)
def _(
    rows: Tensor,
    row_steps: Tensor,
    stack: Tensor,
    stack_steps: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return _by_torch(rows, row_steps, stack.mT, stack_steps, ends, dtype, fast=fast)


@on_gpu(grouped_sum)
def _(
    left: Tensor,
    left_steps: Tensor,
    right: Tensor,
    right_steps: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    # As for other gradients, sums are kept in all bits.
    return _by_torch(left, left_steps, right.t(), right_steps, places, dtype, fast=False)


def _by_torch(
    left: Tensor,
    left_steps: Tensor,
    right: Tensor,
    right_steps: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    public: Any = torch.nn.functional  # torch's own stubs of it lack what follows
    row = public.ScalingType.RowWise
    made: Tensor = public.scaled_grouped_mm(
        left, right, left_steps, row, right_steps, row,
        offs=ends, output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
    return made
