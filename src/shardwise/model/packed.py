"""Parameters that are the bytes of quantised weights.

Such a parameter has the name and the rows of the weight, and the dtype uint8, which no other
parameter of a model has. So the dtype tells what it is, on any mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.facts.nf4 import row_bytes, width_of
from shardwise.kernels.nf4 import pack_into


def is_packed(param: Tensor) -> bool:
    """Whether a parameter is the bytes of quantised weights."""
    return isinstance(param, nn.Parameter) and param.dtype == torch.uint8


def floats_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as files have it: of a packed parameter, that of its floats."""
    if not is_packed(param):
        return tuple(param.shape)
    return (*param.shape[:-1], width_of(param.shape[-1]))


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """A frozen parameter of bytes for a weight, on the same device; quantised unless on meta."""
    shape = (*weight.shape[:-1], row_bytes(weight.shape[-1]))
    packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    if not weight.is_meta:
        pack_into(packed, weight.detach())
    return nn.Parameter(packed, requires_grad=False)
