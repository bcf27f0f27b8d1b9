"""torch.compile, module by module: blocks repeat one graph, which is compiled once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.model.override import override_forward


def apply_compile(modules: list[nn.Module]) -> None:
    """Compile each module's forward, inside the hooks that FSDP2 puts around it."""
    override_forward(modules, "Compiled", _compiled)


def _compiled(cls: type[nn.Module]) -> Callable[..., Any]:
    # Shapes are fixed in training; a dynamic graph would be slower.
    compiled: Callable[..., Any] = torch.compile(cls.forward, dynamic=False)
    return compiled
