"""Parameters of bytes under FSDP2, in releases of torch before 2.13.

There FSDP2 makes parameters of its shards that could have gradients, which torch refuses for whole
numbers (pytorch#185239), and it casts all parameters to `param_dtype`. From 2.13 on it does
neither. `allow_bytes` puts both right in an older release, once for a process. Parameters of floats
are made and cast as before, so that is right for every other model of the process too. There is no
public hook for either, and no public path besides newer releases.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

_SINCE = (2, 13)


class _ParametersByDtype:
    """`torch.nn` as FSDP2's file knows it, with another default for parameters of whole numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    def Parameter(self, data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        """A parameter that has gradients where it can, unless told otherwise."""
        wanted = data.is_floating_point() if requires_grad is None else requires_grad
        return nn.Parameter(data, requires_grad=wanted)


@cache
def allow_bytes() -> None:
    """Let FSDP2 shard parameters of bytes and gather them as they are."""
    if takes_bytes():
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param as theirs

    file: Any = theirs
    own = file.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, mp_policy: MixedPrecisionPolicy) -> None:
        own(self, mp_policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    file.nn = _ParametersByDtype()
    file.FSDPParam.init_dtype_attrs = init_dtype_attrs


def takes_bytes() -> bool:
    """Whether this torch needs no help."""
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) >= _SINCE
