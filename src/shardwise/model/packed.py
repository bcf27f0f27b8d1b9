"""Parameters that are the bytes of frozen weights.

Such a parameter has the name and the rows of the weight, and the dtype of a packing, which no other
parameter of a model has. So the dtype tells what it is, on any mesh. Its boxes are boxes of the
floats, with all of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.kernels.packed_rows import PACKINGS, Packing, pack_into
from shardwise.model.boxes import Box, Sizes


def is_packed(param: Tensor) -> bool:
    """Whether a parameter is the bytes of packed weights."""
    return isinstance(param, nn.Parameter) and param.dtype in PACKINGS


def packing_of(param: Tensor) -> Packing | None:
    """The format of a parameter's rows; None where it is floats."""
    return PACKINGS[param.dtype] if is_packed(param) else None


def floats_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as the model and files have it: of a packed parameter, that of its
    floats."""
    packing = packing_of(param)
    return tuple(param.shape) if packing is None else shape_of_floats(param.shape, packing)


def shape_of_floats(shape: Sequence[int], packing: Packing) -> tuple[int, ...]:
    """The shape of the floats that rows of this shape are made into."""
    return turned((*shape[:-1], packing.width_of(shape[-1])), packing)


def turned(sizes: Sizes, packing: Packing) -> Sizes:
    """Sizes or offsets with the last two in the order of rows, where that is another; and back."""
    return (*sizes[:-2], sizes[-1], sizes[-2]) if packing.is_turned else tuple(sizes)


def in_rows(box: Box, packing: Packing) -> Box:
    """The rows that a box of whole ones is, without the dim along them."""
    return Box(turned(box.offsets, packing)[:-1], turned(box.sizes, packing)[:-1])


def as_rows(floats: Tensor, packing: Packing) -> Tensor:
    """The same floats, with their rows last."""
    return floats.mT if packing.is_turned else floats


def pack_weight(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter of rows for a weight, on the same device; packed unless on meta."""
    packing = PACKINGS[dtype]
    *rows, width = turned(tuple(weight.shape), packing)
    packed = torch.empty((*rows, packing.row_words(width)), dtype=dtype, device=weight.device)
    if not weight.is_meta:
        pack_into(packed, as_rows(weight.detach(), packing))
    return nn.Parameter(packed, requires_grad=False)
