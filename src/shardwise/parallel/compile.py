"""torch.compile, block by block: the repeated graph is compiled once and used by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.model.override import override_forward


def apply_compile(blocks: list[nn.Module]) -> None:
    """Compile each block's forward, inside the hooks that FSDP2 puts around it."""
    override_forward(blocks, "Compiled", _compiled)


def _compiled(cls: type[nn.Module]) -> Callable[..., Any]:
    # Shapes are fixed in training; a dynamic graph would be slower.
    compiled: Callable[..., Any] = torch.compile(cls.forward, dynamic=False)
    return compiled
