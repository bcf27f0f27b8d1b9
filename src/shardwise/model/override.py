"""Change one module's forward without wrapping it, so that names and weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def override_forward(
    modules: list[nn.Module],
    prefix: str,
    make_forward: Callable[[type[nn.Module]], Any],
    *,
    has_part: bool = False,
) -> None:
    """Give each module a subclass whose forward is `make_forward(its class)`.

    With `has_part` the module holds a part of its weights, which its own code could not use, so
    that the new forward stays in `own_forwards` too.

    A wrapper module would rename every parameter inside it; a closure on each instance would make
    torch.compile recompile for each block. One subclass per class avoids both.
    """
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        cls = type(module)
        if cls not in made:
            body: dict[str, Any] = {
                "forward": make_forward(cls),
                "__module__": cls.__module__,
                **({} if has_part else {"overridden": cls}),
            }
            made[cls] = type(f"{prefix}{cls.__name__}", (cls,), body)
        module.__class__ = made[cls]


def surround_forward(modules: list[nn.Module], prefix: str, around: Around) -> None:
    """The same with `around(its class's forward)`, for what a module cannot compute without: it has
    a part of its parameters only. `own_forwards` keeps it."""
    override_forward(modules, prefix, lambda cls: around(cls.forward))
    for module in modules:
        type(module).surrounded = staticmethod(around)  # type: ignore[attr-defined]


@contextmanager
def own_forwards(model: nn.Module) -> Iterator[None]:
    """Inside, every module of `model` runs the forward of its own class again."""
    changed = []
    for module in model.modules():
        # A module may have been changed several times. The first change is the last in this order.
        made = [cls for cls in type(module).__mro__ if "overridden" in vars(cls)]
        if made:
            forward = vars(made[-1])["overridden"].forward
            for cls in reversed(made):
                forward = vars(cls)["surrounded"](forward) if "surrounded" in vars(cls) else forward
            # An attribute of the module comes before its class, and hooks still run around it.
            module.forward = MethodType(forward, module)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
