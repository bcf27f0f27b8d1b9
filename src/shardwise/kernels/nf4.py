"""Weights in NF4, the four-bit format of QLoRA: packed, and made floats again where they are used.

A block of 64 weights is divided by its largest magnitude, and each quotient becomes the nearest of
sixteen values. The magnitudes of a row's blocks are rounded too, to multiples of 1/255 of the
row's largest: this is what QLoRA calls double quantisation. `facts/nf4_size.py` has the layout of
bytes.

Floats are a product of three numbers without a sum, so all devices make the same ones to the last
bit. On a GPU a Triton kernel makes them, on a CPU plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from shardwise.facts.nf4_size import BLOCK, STEP_BYTES, row_bytes, width_of
from shardwise.kernels.operators import on_gpu, operator

# As published with QLoRA: quantiles of a normal distribution, with an exact zero.
CODE_BOOK = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MOST = 255


def pack(rows: Tensor) -> Tensor:
    """Weights (…, width) as bytes (…, row_bytes(width))."""
    width = rows.shape[-1]
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # A GPU would multiply by the inverse of a number, which is another rounding.
    step = largest.amax(-1, keepdim=True) / largest.new_full((), _MOST)
    # A block that is not zero keeps the smallest scale. Zeros divided by zero are zeros.
    scales = torch.where(largest > 0, (largest / step).round_().clamp_(min=1), largest)
    shares = torch.where(largest[..., None] > 0, blocks / largest[..., None], blocks)
    codes = torch.bucketize(shares, _thresholds(rows.device), out_int32=True).byte().flatten(-2)
    # As in bitsandbytes, the first of two weights has the upper four bits.
    packed = codes[..., 0::2] << 4 | codes[..., 1::2]
    made = packed.new_zeros(*rows.shape[:-1], row_bytes(width))
    made[..., : width // 2] = packed
    made[..., width // 2 : width // 2 + width // BLOCK] = scales.byte()
    made[..., -STEP_BYTES:] = step.view(torch.uint8)
    return made


@operator("nf4_floats")
def floats_of(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """The weights of packed rows.

    `after` is not read. It is a gradient that ties this operator to backward: the compiler would
    make the floats once, in forward, and keep them.
    """
    width = width_of(packed.shape[-1])
    pairs = packed[..., : width // 2]
    scales = packed[..., width // 2 : width // 2 + width // BLOCK].float()
    scales *= packed[..., -STEP_BYTES:].contiguous().view(torch.float32)
    byte = torch.arange(256)
    book = torch.tensor(CODE_BOOK)
    both = torch.stack([book[byte >> 4], book[byte & 15]], dim=1)
    values = both[pairs.int()].flatten(-2).unflatten(-1, (-1, BLOCK))
    return (values * scales[..., None]).flatten(-2).to(dtype)


@register_fake(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], width_of(packed.shape[-1]), dtype=dtype)


# This module imports Triton, which is missing where there is no GPU.


@on_gpu(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    from shardwise.kernels import nf4_triton

    return nf4_triton.floats_of(packed, dtype)


def _thresholds(device: torch.device) -> Tensor:
    """The middles between the values. What is above one becomes the larger value."""
    book = torch.tensor(CODE_BOOK, dtype=torch.float64, device=device)
    return ((book[1:] + book[:-1]) / 2).float()
