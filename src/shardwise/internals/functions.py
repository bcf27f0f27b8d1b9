"""Functions and attributes of torch with a leading underscore, each under a name of ours.

Each is one operator or one field that torch's own public code is built on, or that its
documentation shows. No public form does the same on all supported releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor, nn


def chunk_cat_by_torch(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Chunk i of every tensor, one after the other, into row i of `out`: FSDP2's own kernel."""
    torch._chunk_cat(list(tensors), dim, num_chunks, out=out)


def copy_to_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor's numbers to the target at the same place, all in one kernel, which gets
    their addresses as arguments."""
    shaped = [target.view(source.shape) for target, source in zip(targets, sources, strict=True)]
    torch._foreach_copy_(shaped, list(sources))


def scaled_matmul(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """left @ right of float8 matrices, times both scales; `fast`: sums are kept in fewer bits.

    torchao uses the same function. `torch.nn.functional.scaled_mm` calls another kernel.
    """
    return torch._scaled_mm(left, right, *scales, out_dtype=dtype, use_fast_accum=fast)


def add_to_each(tensors: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Add an amount to each tensor in place, in one kernel."""
    torch._foreach_add_(list(tensors), list(amounts))


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, in one kernel, as torch.nn.utils.get_total_norm computes them."""
    return list(torch._foreach_norm(list(tensors)))


def occupy_stream(cycles: int) -> None:
    """Keep the current stream of the GPU busy with one thread that counts cycles.

    torch offers no public way to let a stream wait for a time; its own tests use this one.
    """
    torch.cuda._sleep(cycles)


def keep_memory_history(max_entries: int) -> None:
    """Have the allocator keep a Python stack for each block: the way that pytorch.org's
    "Understanding CUDA Memory Usage" documents."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def dump_memory_history(path: Path) -> None:
    """A snapshot for pytorch.org/memory_viz, documented there too."""
    torch.cuda.memory._dump_snapshot(str(path))


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of `module` in which `children` take the place of those of the same name.
    The module itself stays as it is, which a public setter would change."""
    changed = copy(module)
    changed._modules = {**module._modules, **children}
    return changed


def with_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """The same with other parameters."""
    changed = copy(module)
    changed._parameters = {name: nn.Parameter(value) for name, value in values.items()}
    return changed
