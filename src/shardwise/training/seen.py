"""What modules record of a forward while somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def recorded(modules: Sequence[Any], name: str) -> Iterator[list[tuple[Tensor, ...]]]:
    """Let modules record under the attribute `name` inside the block. The list has afterwards what
    each of them recorded; outside a block the attribute is None.

    A forward that backward recomputes is outside the block, so nothing is recorded twice.
    """
    found: list[tuple[Tensor, ...]] = []
    for module in modules:
        setattr(module, name, ())
    try:
        yield found
    finally:
        for module in modules:
            found.append(getattr(module, name))
            setattr(module, name, None)
