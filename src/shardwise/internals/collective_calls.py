"""Every collective of torch.distributed, told as it is called.

Whoever calls one (Python, FSDP2, compiled code, a pipeline's schedule), it becomes an operator of
the namespace `c10d`, which is given its tensors and its group. There is no public hook for that, so
while somebody listens these operators have a kernel of ours under a dispatch key that they do not
use, above those of devices. It calls the operator again with this key left out. Such a call lets
other threads have the interpreter, as one of `torch.library.get_kernel` would not: gloo's threads
hold a lock while they free tensors, which takes the interpreter, and the call waits for that lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.distributed import ProcessGroup
from torch.library import Library

from shardwise.internals.parts import Changed

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Listener = Callable[[Kind, int, ProcessGroup], AbstractContextManager[object]]
"""Told the kind of a collective, the bytes of its whole tensor (the output of an all-gather, the
input of any other) and its group. The call is made inside of what it returns."""

# (kind, the place of the whole tensor among the arguments)
CALLS: dict[str, tuple[Kind, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
_ABOVE = DispatchKeySet(DispatchKey.ADInplaceOrView)
_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every collective that is called inside."""
    library = Library("c10d", "IMPL")
    for name, call in CALLS.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, partial(_call, listener, operator, *call), "ADInplaceOrView")
    try:
        yield
    finally:
        # A library takes back what it has registered when nothing refers to it.
        del library


def _call(
    listener: Listener, operator: Any, kind: Kind, place: int, *given: Any, **named: Any
) -> Any:
    whole: Tensor | Sequence[Tensor] = given[place]
    num_bytes = sum(each.nbytes for each in ([whole] if isinstance(whole, Tensor) else whole))
    boxed = next(each for each in given if isinstance(each, torch.ScriptObject))
    with listener(kind, num_bytes, ProcessGroup.unbox(boxed)), _ExcludeDispatchKeyGuard(_ABOVE):
        return operator(*given, **named)


def check_calls() -> None:
    """Raise where an operator's arguments are others than those that are read here."""
    for name, (_, place) in CALLS.items():
        arguments = getattr(torch.ops.c10d, name).default._schema.arguments
        kinds = [str(each.type) for each in arguments]
        if "Tensor" not in kinds[place] or kinds.index(_GROUP) <= place:
            raise Changed(f"c10d::{name} takes {', '.join(kinds)}")
