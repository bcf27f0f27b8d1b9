"""The two copies between a unit's tensors and the buffers of its collectives, which are laid out by
ranks.

FSDP2 calls torch's kernels for both. On a GPU torch's copy into a reduce-scatter casts bf16 to fp32
at half the memory's bandwidth, and in a group of one it keeps the host busy for milliseconds.
torch's copy out of an all-gather is as fast as ours, but it first sends a list of addresses to the
device. That transfer queues behind activations that come back from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.internals.functions import chunk_cat_by_torch, copy_to_each

# So few numbers are copied in less time than the host takes to launch a kernel for each tensor.
# Adapters of a block are a dozen small tensors: 0.5 ms of the host beside an H200.
_FEW = 2**23


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Row i of `out` is chunk i of every tensor, one after the other, padded with zeros, as
    in torch's kernel."""
    if dim != 0 or not out.is_cuda or not all(map(_is_plain, (out, *tensors))):
        chunk_cat_by_torch(tensors, dim, num_chunks, out)
        return
    if num_chunks == 1 and out.numel() <= _FEW:
        copy_to_each(out[0].split([tensor.numel() for tensor in tensors]), tensors)
        return
    # Triton is imported when a GPU needs it. It is not installed everywhere.
    from shardwise.kernels.unit_copies_triton import copy_in

    start = 0
    for tensor in tensors:
        rows = -(-tensor.shape[0] // num_chunks)
        chunk = rows * tensor[0].numel()
        copy_in(tensor, out, chunk, start)
        start += chunk


def split_with_sizes_copy(
    gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    """Copy columns of `gathered` into each tensor of `out`, as torch's kernel does."""
    same = all(tensor.dtype == gathered.dtype for tensor in out)
    if dim != 1 or not same or not gathered.is_cuda or not all(map(_is_plain, (gathered, *out))):
        torch.split_with_sizes_copy(gathered, list(sizes), dim=dim, out=list(out))
        return
    from shardwise.kernels.unit_copies_triton import copy_out

    start = 0
    for tensor, size in zip(out, sizes, strict=True):
        copy_out(gathered, tensor, size, start)
        start += size


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dim() > 0 and tensor.numel() > 0
