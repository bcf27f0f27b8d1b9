"""Parameters that are the bytes of frozen weights.

Such a parameter has the name and the rows of the weight, and the dtype of a packing, which no other
parameter of a model has. So the dtype tells what it is, on any mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.kernels.packed_rows import PACKINGS, pack_into


def is_packed(param: Tensor) -> bool:
    """Whether a parameter is the bytes of packed weights."""
    return isinstance(param, nn.Parameter) and param.dtype in PACKINGS


def floats_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as files have it: of a packed parameter, that of its floats."""
    if not is_packed(param):
        return tuple(param.shape)
    return (*param.shape[:-1], PACKINGS[param.dtype].width_of(param.shape[-1]))


def pack_weight(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter of bytes for a weight, on the same device; packed unless on meta."""
    shape = (*weight.shape[:-1], PACKINGS[dtype].row_bytes(weight.shape[-1]))
    packed = torch.empty(shape, dtype=dtype, device=weight.device)
    if not weight.is_meta:
        pack_into(packed, weight.detach())
    return nn.Parameter(packed, requires_grad=False)
