"""Rows for new tokens: tables of a model that have more rows than those in its files.

They begin with the mean of the stored rows. A new token then looks like an average one, and its
logit is no outlier before it is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.model.boxes import Box, whole_box
from shardwise.model.head import embedding_of, head_of
from shardwise.model.stored import StoredWeights
from shardwise.model.weights import Portion

# Rows that are read at once for the mean.
_ROWS = 4096


def table_params(model: nn.Module) -> set[int]:
    """Identities of the parameters with a row for each token."""
    modules = (embedding_of(model), head_of(model))
    return {id(param) for module in modules if module is not None for param in module.parameters()}


def num_new_rows(stored: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """How many rows a table has beyond those that are stored; 0 where it is another table."""
    is_same = len(stored) == len(wanted) and stored[1:] == wanted[1:]
    return max(0, wanted[0] - stored[0]) if is_same else 0


def read_with_new_rows(files: StoredWeights, key: str, kept: Portion) -> int:
    """Fill this rank's part of a table. Returns the bytes read. Only a rank with new rows reads
    rows that it does not keep."""
    stored, num_bytes = whole_box(files.shape(key)), 0
    first, rest = stored.sizes[0], kept.shape[1:]
    added = Box((first, *(0 for _ in rest)), (kept.shape[0] - first, *rest))
    for mine, own in kept.places:
        local = kept.local[own.slices]
        known, new = mine.overlap(stored), mine.overlap(added)
        if known.num_elements:
            part = files.read(key, known)
            local[known.seen_from(mine).slices].copy_(part)
            num_bytes += part.nbytes
        if new.num_elements:
            local[new.seen_from(mine).slices].copy_(_mean_row(files, key, new))
    return num_bytes


def _mean_row(files: StoredWeights, key: str, part: Box) -> Tensor:
    """The mean of all stored rows, in the columns of `part`."""
    num_rows, columns = files.shape(key)[0], Box(part.offsets[1:], part.sizes[1:])
    total = torch.zeros(columns.sizes, dtype=torch.float64)
    for start in range(0, num_rows, _ROWS):
        count = min(_ROWS, num_rows - start)
        box = Box((start, *columns.offsets), (count, *columns.sizes))
        total += files.read(key, box).double().sum(0)
    return total / num_rows
