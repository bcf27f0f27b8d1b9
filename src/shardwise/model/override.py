"""Change one module's forward without wrapping it, so that names and weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def override_forward(
    modules: list[nn.Module], prefix: str, make_forward: Callable[[type[nn.Module]], Any]
) -> None:
    """Give each module a subclass whose forward is `make_forward(its class)`.

    A wrapper module would rename every parameter inside it; a closure on each instance would make
    torch.compile recompile for each block. One subclass per class avoids both.
    """
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        cls = type(module)
        if cls not in made:
            body = {"forward": make_forward(cls), "__module__": cls.__module__}
            made[cls] = type(f"{prefix}{cls.__name__}", (cls,), body)
        module.__class__ = made[cls]
