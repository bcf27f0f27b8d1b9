"""FSDP2's private operators, and the streams on which it allocates.

Around its collectives FSDP2 calls three operators of the namespace `fsdp`:

- `fsdp::all_gather_copy_in` copies a unit's shards into this rank's slot of the all-gather's
  output, and returns that slot and the output,
- `fsdp::split_with_sizes_copy` copies what was gathered into the unit's parameters,
- `fsdp::chunk_cat` copies a unit's gradients into the input of its reduce-scatter.

There is no public hook for them. `replace_copy` registers another kernel for such an operator with
`torch.library`, once for a process, because an operator has one kernel for a device. That is right
for every other model of the process too: the kernels in `kernels/unit_copies.py` compute the same
numbers, and those in `parallel/gather.py` hand all memory that is not theirs to FSDP2's own kernel,
which `torch.library.get_kernel` keeps.

FSDP2 allocates the memory of a collective through the object that `set_custom_all_gather` or
`set_custom_reduce_scatter` was given. Both are public. FSDP2 does not promise on which stream it
allocates. Today it allocates the input of a reduction on the compute stream, and the output on the
stream that reduces. `ComputeMemory` and `OneMemory` in `parallel/comm.py` make use of that. They
are right in any order of calls, and share no memory where both are allocated on one stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule  # its module defines the operators
from torch.library import Library, get_kernel

from shardwise.internals.parts import Changed

# As they are from torch 2.11 to 2.15.
SCHEMAS = {
    "all_gather_copy_in": "(Tensor[] all_gather_inputs, Tensor all_gather_output, "
    "SymInt[] inp_split_sizes, SymInt all_gather_input_numel, SymInt rank) -> (Tensor, Tensor)",
    "split_with_sizes_copy": "(Tensor all_gather_output, SymInt[] all_gather_input_split_sizes, "
    "int dim=0, *, Tensor(a!)[] out) -> ()",
    "chunk_cat": "(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()",
}
Kernel = Callable[..., Any]


@cache
def replace_copy(name: str, kernel: Kernel, device: str) -> Library:
    """Have `fsdp::name` on tensors of `device` be `kernel`.

    A kernel that returns NotImplemented leaves the call to FSDP2's own. A second call
    with the same kernel changes nothing.
    """
    key = device.upper()
    theirs = get_kernel(f"fsdp::{name}", key)

    def call(keys: Any, *given: Any, **named: Any) -> Any:
        found = kernel(*given, **named)
        return theirs.call_boxed(keys, *given, **named) if found is NotImplemented else found

    library = Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        # torch says that a kernel is replaced, which is the purpose.
        warnings.simplefilter("ignore")
        library.impl(name, call, key, with_keyset=True, allow_override=True)
    return library


def base_of(view: Tensor) -> Tensor:
    """The tensor that `view` is a view of, or `view` itself. FSDP2 hands views of the memory that
    it was given to its operators."""
    return view if view._base is None else view._base


def check_copies() -> None:
    """The two operators that `kernels/unit_copies.py` has kernels for."""
    _check("chunk_cat", "split_with_sizes_copy")


def check_gathers() -> None:
    """The two operators around an all-gather."""
    _check("all_gather_copy_in", "split_with_sizes_copy")


def check_reductions() -> Any:
    """The hook through which FSDP2 asks for a reduction's memory."""
    return FSDPModule.set_custom_reduce_scatter


def _check(*names: str) -> None:
    for name in names:
        found = str(getattr(torch.ops.fsdp, name).default._schema)
        if found != f"fsdp::{name}{SCHEMAS[name]}":
            raise Changed(f"FSDP2's operator is {found}")
