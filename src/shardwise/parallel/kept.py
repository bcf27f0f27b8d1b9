"""Selective checkpointing for models that modify results in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

# These two are private: no public API shows an operator its arguments, or flattens nested results.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def contexts_that_allow_changes(policy: Callable[..., Any]) -> Contexts:
    """Like `create_selective_checkpoint_contexts(policy)`, for blocks that run without the
    compiler.

    torch refuses to recompute from a saved result that was modified in place, as gpt-oss does when
    it adds the experts' bias to their matmul's result. Here the value before such a change is
    saved, and the recomputation makes the change again. Compiled blocks change nothing in place.
    """
    keeping, replaying = create_selective_checkpoint_contexts(policy)
    # Ours is the outer context, so torch's does not count the copies that it makes.
    return _Both(_CopyBeforeChange(keeping), keeping), replaying


class _Both(ExitStack):
    """Two contexts as one, the second inside the first."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> _Both:
        for context in self._contexts:
            self.enter_context(context)
        return self


class _CopyBeforeChange(TorchDispatchMode):
    """Copies a saved result before an operator modifies it.

    Where torch keeps saved results is private; tests/unit/parallel/test_kept.py would notice a
    change.
    """

    def __init__(self, keeping: Any) -> None:
        super().__init__()
        self._kept = keeping.storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator of a block's forward."""
        kwargs = kwargs or {}
        # Higher-order operators have no schema, and change nothing.
        schema = getattr(func, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed = args[place] if place < len(args) else kwargs.get(argument.name)
                self._save_from(changed)
        return func(*args, **kwargs)

    def _save_from(self, changed: Any) -> None:
        for tensor in tree_leaves(changed):
            if isinstance(tensor, Tensor):
                for entry in self._entries():
                    if _share_storage(entry.val, tensor):
                        entry.val = entry.val.clone()
                        entry.version = entry.val._version

    def _entries(self) -> Iterator[Any]:
        for results in self._kept.values():
            for result in results.values() if isinstance(results, dict) else results:
                yield from (leaf for leaf in tree_leaves(result) if hasattr(leaf, "val"))


def _share_storage(kept: Any, changed: Tensor) -> bool:
    if not isinstance(kept, Tensor) or kept.device != changed.device:
        return False
    return kept.untyped_storage().data_ptr() == changed.untyped_storage().data_ptr() != 0
