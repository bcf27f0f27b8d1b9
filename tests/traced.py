"""torch.compile as far as its graphs: blocks are traced, cut into forward and backward, and run.

A compile of a block takes ten CPU seconds and more, most of them in Inductor and a C++ compiler.
What we change is the graphs. `make chaos` makes kernels of them in every form, `make test` in some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from shardwise.internals.graphs import Graphs, noting_backend
from shardwise.parallel.keep_sums import KeepSums


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, torch.compile makes no kernels.

    What it has traced before is forgotten. All blocks share the code of recompute's forward, and
    after eight ways to run the same code torch.compile leaves the next one uncompiled.
    """
    torch.compiler.reset()
    compile_ = torch.compile

    def trace(function: Callable[..., Any], **options: Any) -> Any:
        backend = noting_backend(Graphs(), KeepSums())
        return compile_(function, dynamic=options["dynamic"], backend=backend)

    with mock.patch.object(torch, "compile", trace):
        yield
