"""Operators that take the host little, for kernels that are short.

`torch.library.custom_op` runs four functions of Python in each call, for autograd and to look for
results that share memory with inputs. Adapters call such operators dozens of times in a block, and
their steps may wait for the host. These are defined by the functions that `custom_op` is made of.
Their results are always new memory, and they have no backward: they run inside functions that do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tag
from torch.library import define, impl, infer_schema

_NAMESPACE = "shardwise"


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """The operator `shardwise::name`, whose function is its kernel on a CPU."""

    def make(function: Callable[..., Any]) -> Any:
        qualified = f"{_NAMESPACE}::{name}"
        define(qualified, infer_schema(function, mutates_args=()), tags=Tag.pt2_compliant_tag)
        impl(qualified, "cpu", function)
        return getattr(getattr(torch.ops, _NAMESPACE), name).default

    return make


def on_gpu(made: Any) -> Callable[[Callable[..., Any]], None]:
    """The operator's kernel on a GPU."""

    def register(kernel: Callable[..., Any]) -> None:
        impl(made.name(), "cuda", kernel)

    return register
