"""Weights in fp8 with scales for blocks, as DeepSeek-V3 is published: kept as they are, and made
floats where they are used.

A float is the product of two numbers in fp32, rounded once to the format that is asked for. So all
devices make the same ones. `facts/fp8_block_size.py` has the layout of bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import register_fake

from shardwise.facts.fp8_block_size import BLOCK, SCALE_BYTES, num_blocks, row_bytes, width_of
from shardwise.kernels.float8 import FORWARD
from shardwise.kernels.operators import on_gpu, operator


def join(values: Tensor, scales: Tensor) -> Tensor:
    """Numbers (…, width) in e4m3 and the scales (…, blocks) of each row as rows of bytes."""
    width, used = values.shape[-1], scales.shape[-1] * SCALE_BYTES
    made = torch.zeros(
        *values.shape[:-1], row_bytes(width), dtype=torch.uint8, device=values.device
    )
    made[..., :width] = values.view(torch.uint8)
    made[..., width : width + used] = scales.float().contiguous().view(torch.uint8)
    return made


def pack(rows: Tensor) -> Tensor:
    """Weights (…, width) as rows of bytes. Published ones are never packed: this is for random
    weights."""
    width = rows.shape[-1]
    padded = F.pad(rows.float(), (0, num_blocks(width) * BLOCK - width))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scales = torch.where(largest > 0, largest / torch.finfo(FORWARD).max, 1.0)
    values = (blocks / scales[..., None]).flatten(-2)[..., :width].to(FORWARD)
    return join(values, scales)


@operator("fp8_block_floats")
def floats_of(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """The weights of packed rows; `after` is as for NF4."""
    rows = packed.view(torch.uint8)
    width = width_of(rows.shape[-1])
    used = num_blocks(width) * SCALE_BYTES
    scales = rows[..., width : width + used].contiguous().view(torch.float32)
    by_column = scales.repeat_interleave(BLOCK, -1)[..., :width]
    return (rows[..., :width].view(FORWARD).float() * by_column).to(dtype)


@register_fake(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    width = width_of(packed.shape[-1] * packed.dtype.itemsize)
    return packed.new_empty(*packed.shape[:-1], width, dtype=dtype)


# This module imports Triton, which is missing where there is no GPU.


@on_gpu(floats_of)
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    from shardwise.kernels import fp8_blocks_triton

    return fp8_blocks_triton.floats_of(packed, dtype)
