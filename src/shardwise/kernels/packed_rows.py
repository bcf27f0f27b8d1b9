"""Frozen weights as rows of bytes, in any of the formats that they may be stored in.

The dtype of the bytes says which format they have, on every mesh: FSDP2 keeps no attributes of
parameters, and neither casts whole numbers nor asks what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm

from shardwise.facts import float8_size as float8_sizes
from shardwise.facts import nf4_size as nf4_sizes
from shardwise.kernels import float8_rows, nf4

# Weights that are packed at once, so that what is made on the way stays small.
_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True)
class Packing:
    """One format of rows."""

    base: str
    """What `adapter.base` calls it."""

    name: str
    """What messages call it."""

    multiple: int
    """Rows have multiples of so many weights."""

    why_multiple: str
    row_bytes: Callable[[int], int]
    """The bytes of a row of so many weights."""

    width_of: Callable[[int], int]
    """The weights of a row of so many bytes."""

    pack: Callable[[Tensor], Tensor]
    floats_of: Callable[[Tensor, torch.dtype, Tensor | None], Tensor]


PACKINGS = {
    torch.uint8: Packing(
        "nf4",
        "NF4",
        nf4_sizes.BLOCK,
        f"{nf4_sizes.BLOCK} weights of a row share a scale",
        nf4_sizes.row_bytes,
        nf4_sizes.width_of,
        nf4.pack,
        nf4.floats_of,
    ),
    torch.int8: Packing(
        "float8",
        "float8",
        float8_sizes.MULTIPLE,
        f"float8 matmuls take {float8_sizes.MULTIPLE} weights of a row at a time",
        float8_sizes.row_bytes,
        float8_sizes.width_of,
        float8_rows.pack,
        float8_rows.floats_of,
    ),
}
"""By the dtype of the bytes, which nothing else in a model has."""


@torch.no_grad()
def pack_into(target: Tensor, rows: Tensor) -> None:
    """Pack `rows`, on the device of the bytes that they become."""
    packing = PACKINGS[target.dtype]
    bytes_of = target.view(-1, target.shape[-1])
    given = rows.reshape(-1, rows.shape[-1])
    count = max(1, _AT_ONCE // rows.shape[-1])
    for start in range(0, len(given), count):
        part = given[start : start + count].to(target.device)
        bytes_of[start : start + count].copy_(packing.pack(part))


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
        return grouped_mm(rows, weights if is_transposed else weights.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows."""
        packed, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        weights = floats_of(packed, grad.dtype, grad)
        x_grad = grouped_mm(grad, weights.mT if ctx.is_transposed else weights, offs=ends)
        return x_grad, None, None, None
