"""Operators as they are dispatched: `TorchDispatchMode` shows each with its arguments and its
schema. No public form does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.internals.parts import Changed

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]


def written_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The tensors that an operator changes in place."""
    # Higher-order operators have no schema, and change nothing.
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))


def check_kept() -> None:
    """A mode sees an operator and what it changes."""
    with _Seen() as seen:
        torch.ones(1).add_(1)
    if seen.written != ["aten::add_.Tensor"]:
        raise Changed("operators that change their arguments are not shown as such")


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(True for _ in written_arguments(func, args, kwargs or {})):
            self.written.append(func.name())
        return func(*args, **(kwargs or {}))
