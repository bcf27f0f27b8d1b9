"""The copy of a unit's gradients into what a reduce-scatter takes: for every rank its rows of all.

FSDP2 calls torch's kernel for it, which on a GPU casts bf16 to fp32 at half the memory's rate, and
in a group of one keeps the host busy for milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.library import Library


@cache
def take_over() -> Library:
    """Have FSDP2's operator call this kernel on GPUs. It has no public hook for this copy."""
    ours = Library("fsdp", "IMPL")
    with warnings.catch_warnings():
        # torch says that a kernel is replaced, which is the purpose.
        warnings.simplefilter("ignore")
        ours.impl("chunk_cat", chunk_cat, "CUDA", allow_override=True)
    return ours


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """As torch's: row i of `out` is chunk i of every tensor, one after the other, padded with 0."""
    if dim != 0 or not out.is_cuda or not all(map(_is_plain, (out, *tensors))):
        torch._chunk_cat(list(tensors), dim, num_chunks, out=out)
        return
    # Imported when a GPU needs it: elsewhere there is no Triton.
    from shardwise.kernels.chunk_cat_triton import launch

    offset = 0
    for tensor in tensors:
        rows = -(-tensor.shape[0] // num_chunks)
        chunk = rows * tensor[0].numel()
        launch(tensor, out, chunk, offset)
        offset += chunk


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dim() > 0 and tensor.numel() > 0
