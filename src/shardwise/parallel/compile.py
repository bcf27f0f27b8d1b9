"""torch.compile, module by module. Blocks share one graph, which is compiled once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.internals.parts import SUMS, is_open
from shardwise.model.override import override_forward


def apply_compile(modules: list[nn.Module]) -> None:
    """Compile each module's forward, inside the hooks that FSDP2 puts around it."""
    # Imported on need, as the compiler is: it takes seconds.
    from shardwise.internals.inductor import allow_side_effects

    # Routers store their logits as a side effect.
    allow_side_effects()
    override_forward(modules, "Compiled", _compiled)


def _compiled(cls: type[nn.Module]) -> Callable[..., Any]:
    # Shapes are fixed in training; a dynamic graph would be slower.
    compiled: Callable[..., Any] = torch.compile(cls.forward, dynamic=False, options=_options())
    return compiled


def _options() -> dict[str, Any] | None:
    if not is_open(SUMS):
        return None
    from shardwise.parallel.keep_sums import KeepSums

    return {"joint_custom_post_pass": KeepSums()}
