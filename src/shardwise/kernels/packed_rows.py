"""Frozen weights as rows of bytes, in any of the formats that they may be stored in.

A parameter of rows has a dtype of whole numbers, which says what format its bytes have, on every
mesh: FSDP2 keeps no attributes of parameters, and neither casts whole numbers nor asks what they
mean. Formats of four and of eight bytes a number are the same bytes, in longer words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.facts import float8_size as float8_sizes
from shardwise.facts import fp8_block_size as fp8_sizes
from shardwise.facts import mxfp4_size as mxfp4_sizes
from shardwise.facts import nf4_size as nf4_sizes
from shardwise.facts.adapter_sizes import BASE_NAMES
from shardwise.facts.quantization import FP8, MXFP4
from shardwise.kernels import float8_rows, fp8_blocks, mxfp4, nf4
from shardwise.kernels.grouped_matmul import grouped_matmul

# Weights that are packed at once, so that what is made on the way stays small.
_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One format of rows."""

    dtype: torch.dtype
    """That of the parameters, which nothing else in a model has."""

    base: str
    """What `adapter.base` calls it."""

    multiple: int
    """Rows have multiples of so many weights."""

    why_multiple: str
    row_bytes: Callable[[int], int]
    """The bytes of a row of so many weights."""

    width_of_bytes: Callable[[int], int]
    """The weights of a row of so many bytes."""

    pack: Callable[[Tensor], Tensor]
    floats_of: Callable[[Tensor, torch.dtype, Tensor | None], Tensor]
    is_shipped: bool = False
    """Whether its bytes are those of weight files, and are read as they are."""

    is_turned: bool = False
    """Whether rows are columns of the model's tensor, as files have them: the last two dims change
    places. Such a format is for stacked experts alone."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return BASE_NAMES[self.base]

    def row_words(self, width: int) -> int:
        """The numbers of `dtype` of a row of so many weights."""
        return self.row_bytes(width) // self.dtype.itemsize

    def width_of(self, num_words: int) -> int:
        """The weights of a row of so many of them."""
        return self.width_of_bytes(num_words * self.dtype.itemsize)


_ALL = (
    Packing(
        dtype=torch.uint8,
        base="nf4",
        multiple=nf4_sizes.BLOCK,
        why_multiple=f"{nf4_sizes.BLOCK} weights of a row share a scale",
        row_bytes=nf4_sizes.row_bytes,
        width_of_bytes=nf4_sizes.width_of,
        pack=nf4.pack,
        floats_of=nf4.floats_of,
    ),
    Packing(
        dtype=torch.int8,
        base="float8",
        multiple=float8_sizes.MULTIPLE,
        why_multiple=f"float8 matmuls take {float8_sizes.MULTIPLE} weights of a row at a time",
        row_bytes=float8_sizes.row_bytes,
        width_of_bytes=float8_sizes.width_of,
        pack=float8_rows.pack,
        floats_of=float8_rows.floats_of,
    ),
    Packing(
        dtype=torch.int32,
        base=MXFP4,
        multiple=mxfp4_sizes.BLOCK,
        why_multiple=f"{mxfp4_sizes.BLOCK} weights of a row share a scale",
        row_bytes=mxfp4_sizes.row_bytes,
        width_of_bytes=mxfp4_sizes.width_of,
        pack=mxfp4.pack,
        floats_of=mxfp4.floats_of,
        is_shipped=True,
        is_turned=True,
    ),
    Packing(
        dtype=torch.int64,
        base=FP8,
        multiple=fp8_sizes.MULTIPLE,
        why_multiple=f"a row is whole words of {fp8_sizes.MULTIPLE} bytes",
        row_bytes=fp8_sizes.row_bytes,
        width_of_bytes=fp8_sizes.width_of,
        pack=fp8_blocks.pack,
        floats_of=fp8_blocks.floats_of,
        is_shipped=True,
    ),
)
PACKINGS = {packing.dtype: packing for packing in _ALL}
"""By the dtype of parameters."""


@torch.no_grad()
def pack_into(target: Tensor, rows: Tensor) -> None:
    """Pack `rows`, on the device of the bytes that they become."""
    packing = PACKINGS[target.dtype]
    words = target.view(-1, target.shape[-1])
    given = rows.reshape(-1, rows.shape[-1])
    count = max(1, _AT_ONCE // rows.shape[-1])
    for start in range(0, len(given), count):
        part = given[start : start + count].to(target.device)
        words[start : start + count].copy_(packing.pack(part).view(packing.dtype))


def floats_of(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """The weights of packed rows. `after` ties this to backward, and is not read."""
    return PACKINGS[packed.dtype].floats_of(packed, dtype, after)


@torch.compiler.allow_in_graph
class PackedProduct(torch.autograd.Function):
    """x @ W.T, where W is packed and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """The bytes are saved, not the floats that they become."""
        ctx.save_for_backward(packed)
        return F.linear(x, floats_of(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        return grad @ floats_of(packed, grad.dtype, grad), None, None


@torch.compiler.allow_in_graph
class PackedGroupedProduct(torch.autograd.Function):
    """The same for experts: rows are sorted by expert, and those of expert e end at ends[e].

    Weights are (experts, out, in), or (experts, in, out) where `is_transposed`.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, packed: Tensor, ends: Tensor, is_transposed: bool
    ) -> Tensor:
        """One grouped matmul over the weights of all experts."""
        ctx.save_for_backward(packed, ends)
        ctx.is_transposed = is_transposed
        weights = floats_of(packed, rows.dtype)
        return grouped_matmul(rows, weights if is_transposed else weights.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows."""
        packed, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        weights = floats_of(packed, grad.dtype, grad)
        x_grad = grouped_matmul(grad, weights.mT if ctx.is_transposed else weights, ends)
        return x_grad, None, None, None
