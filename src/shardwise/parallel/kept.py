"""Selective checkpointing of blocks that run without the compiler.

torch's own contexts keep the results of some operators too. They cannot be used for two kinds of
blocks. They refuse to recompute from a result that was changed in place, as gpt-oss does when it
adds the experts' bias to their matmul's result. And they count every operator: where experts are a
unit of their own, FSDP2's hooks run inside the block, and call others when they run again.

Here only what is kept is counted, and a kept result is copied before it is changed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.internals.dispatch_mode import (
    TorchDispatchMode,
    tree_leaves,
    tree_map_only,
    written_arguments,
)

Contexts = tuple[TorchDispatchMode, TorchDispatchMode]
# Of an operator and its arguments.
IsKept = Callable[[Any, tuple[Any, ...]], bool]


def contexts_that_keep(is_kept: IsKept) -> Contexts:
    """For `torch.utils.checkpoint`: a context of forward, which keeps the results of operators, and
    one of the recomputation, which takes them."""
    kept = KeptResults()
    return _Keeping(is_kept, kept), _Taking(is_kept, kept)


class KeptResults:
    """What one forward of a block has kept for its recomputation, by operator and in order."""

    def __init__(self) -> None:
        self._by_operator: dict[Any, deque[Any]] = defaultdict(deque)

    def add(self, func: Any, result: Any) -> None:
        """Keep a result without its graph."""
        self._by_operator[func].append(tree_map_only(Tensor, Tensor.detach, result))

    def take(self, func: Any) -> Any:
        """The next result of an operator."""
        if not self._by_operator[func]:
            raise RuntimeError(f"{func} is called more often in backward than it was in forward")
        return self._by_operator[func].popleft()

    def copy_those_of(self, changed: Tensor) -> None:
        """Copy the kept results that share memory with `changed`."""
        for results in self._by_operator.values():
            for place, result in enumerate(results):
                if any(_share_storage(leaf, changed) for leaf in tree_leaves(result)):
                    results[place] = tree_map_only(Tensor, Tensor.clone, result)


class _Keeping(TorchDispatchMode):
    # FlexAttention is a higher-order operator.
    supports_higher_order_operators = True

    def __init__(self, is_kept: IsKept, kept: KeptResults) -> None:
        super().__init__()
        self._is_kept, self._kept = is_kept, kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator of a block's forward."""
        kwargs = kwargs or {}
        for tensor in written_arguments(func, args, kwargs):
            self._kept.copy_those_of(tensor)
        result = func(*args, **kwargs)
        if self._is_kept(func, args):
            self._kept.add(func, result)
        return result


class _Taking(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, is_kept: IsKept, kept: KeptResults) -> None:
        super().__init__()
        self._is_kept, self._kept = is_kept, kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator of the recomputation."""
        if self._is_kept(func, args):
            return self._kept.take(func)
        return func(*args, **(kwargs or {}))


def _share_storage(kept: Any, changed: Tensor) -> bool:
    if not isinstance(kept, Tensor) or kept.device != changed.device:
        return False
    return kept.untyped_storage().data_ptr() == changed.untyped_storage().data_ptr() != 0
