"""Operators as they are dispatched, and where selective checkpointing keeps their results.

`TorchDispatchMode` shows each operator with its arguments; no public form does. Selective
checkpointing keeps the results of a block in the `storage` of its first context, by operator. Each
is wrapped together with the version that it had: torch refuses to recompute from one that was
changed in place. Code that replaces a kept result must also record the new version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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


class KeptResults:
    """What one forward of a block has kept for its recomputation."""

    def __init__(self, keeping: Any) -> None:
        self._storage = keeping.storage

    def copy_those_of(self, changed: Tensor) -> None:
        """Copy the kept results that share memory with `changed`."""
        for entry in self._entries():
            if _share_storage(entry.val, changed):
                entry.val = entry.val.clone()
                entry.version = entry.val._version

    def _entries(self) -> Iterator[Any]:
        for results in self._storage.values():
            for result in results.values() if isinstance(results, dict) else results:
                yield from (leaf for leaf in tree_leaves(result) if hasattr(leaf, "val"))


def check_kept() -> None:
    """One kept result can be found and replaced."""
    keeping, _ = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    with keeping:
        result = torch.ones(1) + 1
    entries = list(KeptResults(keeping)._entries())
    if not any(_share_storage(entry.val, result) for entry in entries):
        raise Changed("selective checkpointing keeps its results elsewhere")
    if not all(hasattr(entry, "version") for entry in entries):
        raise Changed("selective checkpointing notes versions elsewhere")


def _share_storage(kept: Any, changed: Tensor) -> bool:
    if not isinstance(kept, Tensor) or kept.device != changed.device:
        return False
    return kept.untyped_storage().data_ptr() == changed.untyped_storage().data_ptr() != 0
