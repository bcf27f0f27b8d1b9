"""Collectives as operators that return a tensor, as torch.distributed.tensor is built on them.

The public functions fill a tensor that they are given, and need a group as an object. The compiler
traces these as any operator, a group has a name, and activation checkpointing can call them again.
DTensor has both of them, but knows no order of ranks other than their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

GATHER, EXCHANGE = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_to_all_single"
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
"""Its results can be kept for a recomputation."""


def gathered(mine: Tensor, num_ranks: int, group: str) -> Tensor:
    """The tensors of all ranks of a group, one after the other along the first dim."""
    calls = torch.ops._c10d_functional
    found: Tensor = calls.all_gather_into_tensor(mine.contiguous(), num_ranks, group)
    waited: Tensor = calls.wait_tensor(found)
    return waited


def exchanged(mine: Tensor, takes: Sequence[int], gives: Sequence[int], group: str) -> Tensor:
    """Give each rank of a group its rows of `mine`, in order, and take as many from each as
    `takes` says."""
    return arrived(exchanging(mine, takes, gives, group))


def exchanging(mine: Tensor, takes: Sequence[int], gives: Sequence[int], group: str) -> Tensor:
    """The same, begun: the result may not be read before `arrived` has returned it."""
    found: Tensor = ALL_TO_ALL(mine.contiguous(), list(takes), list(gives), group)
    return found


def arrived(pending: Tensor) -> Tensor:
    """What was exchanged. The device waits for it, and the host does not."""
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return waited


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Tensor]]) -> Iterator[None]:
    """Let functions do what operators do, for tensors of CPUs and GPUs, while the block runs.

    Compiled code calls operators too. They are named as in "library::operator", and keep their
    shapes on tensors without data and their gradients.
    """
    libraries: dict[str, Library] = {}
    for name, function in functions.items():
        namespace, _, operator = name.partition("::")
        library = libraries.setdefault(namespace, Library(namespace, "IMPL"))
        for key in ("CPU", "CUDA"):
            library.impl(operator, function, key)
    try:
        yield
    finally:
        # A library takes back what it has registered when nothing refers to it.
        del library
        libraries.clear()
