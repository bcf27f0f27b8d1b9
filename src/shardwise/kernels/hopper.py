"""Whether this GPU is a Hopper, and whether its matmuls can have an epilogue of ours."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

_CAPABILITY = 9
# The releases of quack-kernels whose interface is known; shardwise[quack] asks for the same.
_FIRST, _BEYOND = (0, 6, 4), (0, 7)


@cache
def on_hopper() -> bool:
    """Whether this machine's GPUs are Hopper. The first GPU stands for all."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _CAPABILITY


@cache
def has_quack() -> bool:
    """Whether quack-kernels is installed, whose matmuls take an epilogue."""
    try:
        found = version("quack-kernels")
    except PackageNotFoundError:
        return False
    return _FIRST <= tuple(map(int, re.findall(r"\d+", found)[:3])) < _BEYOND
