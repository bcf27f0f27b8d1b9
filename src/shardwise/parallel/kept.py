"""Selective checkpointing for models that change results in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

# Neither is public: no public form shows an operator its arguments, nor flattens nested results.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def contexts_that_allow_changes(policy: Callable[..., Any]) -> Contexts:
    """As `create_selective_checkpoint_contexts(policy)`, for blocks that run without the compiler.

    torch refuses to recompute from a kept result that was changed in place, as gpt-oss changes
    what its experts' matmul gives when it adds their bias. Here the value before such a change is
    kept, and the recompute makes the change again. Compiled blocks change nothing in place.
    """
    keeping, replaying = create_selective_checkpoint_contexts(policy)
    # Ours is the outer one, so that torch's does not count the copies that it makes.
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
    """Gives kept results a copy of their own before an operator changes them.

    Where torch keeps results is not public; tests/unit/parallel/test_kept.py would notice.
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
