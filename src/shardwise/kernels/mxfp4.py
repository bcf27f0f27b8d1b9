"""Weights in MXFP4, as gpt-oss is published: kept as they are, and made floats where they are used.

Each of 32 weights of a row is one of sixteen values, and all of them are multiplied by one power of
two. A power of two rounds nothing, so floats are the published values, in bf16 too.
`facts/mxfp4_size.py` has the layout of bytes.

On a GPU a Triton kernel makes the same floats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from shardwise.facts.mxfp4_size import BLOCK, row_bytes, width_of
from shardwise.kernels.operators import on_gpu, operator

# The values of e2m1 by their four bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS, _DIGITS = 127, 23  # of the exponent of fp32
_MOST_EXPONENT = 2  # of e2m1
_NAN = 255


def join(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks (…, groups, 16) and scales (…, groups) of a file as rows of bytes."""
    codes = blocks.flatten(-2)
    made = codes.new_zeros(*codes.shape[:-1], row_bytes(2 * codes.shape[-1]))
    made[..., : codes.shape[-1]] = codes
    made[..., codes.shape[-1] : codes.shape[-1] + scales.shape[-1]] = scales
    return made


def pack(rows: Tensor) -> Tensor:
    """Weights (…, width) as rows of bytes. Published ones are never packed: this is for random
    weights."""
    groups = rows.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = ((largest.view(torch.int32) >> _DIGITS) - _MOST_EXPONENT).clamp(min=1)
    shares = groups / (exponents << _DIGITS).view(torch.float32)
    values = torch.tensor(E2M1[:8], device=rows.device)
    codes = torch.bucketize(shares.abs(), (values[1:] + values[:-1]) / 2, out_int32=True)
    codes += 8 * (shares < 0)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return join(pairs.byte(), exponents.squeeze(-1).byte())


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks (…, groups, 16) times scales (…, groups) as values (…, groups · 32), in bf16: it holds
    two bits of mantissa, and has their exponents."""
    # The low four bits come first. Both values of a byte are looked up at once, as one number.
    by_bits = torch.tensor(E2M1, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([by_bits[byte & 15], by_bits[byte >> 4]], dim=1).view(torch.int32).flatten()
    # This takes a third of the time of indexing.
    values = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS).to(torch.bfloat16)
    powers[_NAN] = torch.nan
    by_group = values.view(*scales.shape, BLOCK)
    return by_group.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2)


@operator("mxfp4_floats")
def floats_of(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """The weights of packed rows; `after` is as for NF4."""
    rows = packed.view(torch.uint8)
    width = width_of(rows.shape[-1])
    blocks = rows[..., : width // 2].unflatten(-1, (-1, BLOCK // 2))
    return unpack(blocks, rows[..., width // 2 : width // 2 + width // BLOCK]).to(dtype)


@register_fake(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    width = width_of(packed.shape[-1] * packed.dtype.itemsize)
    return packed.new_empty(*packed.shape[:-1], width, dtype=dtype)


# This module imports Triton, which is missing where there is no GPU.


@on_gpu(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    from shardwise.kernels import mxfp4_triton

    return mxfp4_triton.floats_of(packed, dtype)
