"""Selective checkpointing for models that modify results in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardwise.internals.dispatch import KeptResults, TorchDispatchMode, written_arguments

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
    """Copies a saved result before an operator modifies it."""

    def __init__(self, keeping: Any) -> None:
        super().__init__()
        self._kept = KeptResults(keeping)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator of a block's forward."""
        kwargs = kwargs or {}
        for tensor in written_arguments(func, args, kwargs):
            self._kept.copy_those_of(tensor)
        return func(*args, **kwargs)
