"""Functions and attributes of torch with a leading underscore, each under a name of ours.

Each is one operator or one field that torch's own public code is built on. What they do is tested
on every supported release; no public form does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_cat_by_torch(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """Chunk i of every tensor, one after the other, into row i of `out`: FSDP2's own kernel."""
    torch._chunk_cat(list(tensors), dim, num_chunks, out=out)
