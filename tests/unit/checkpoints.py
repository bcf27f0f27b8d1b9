"""Checkpoints of one tensor, written as any save is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.files import write_file
from shardwise.checkpoint.index import Piece, StoredTensor, dump_index
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.store import Checkpoint, begin, publish
from shardwise.lease.lease import UNFENCED, Fence

SHARD = "rank-00000.bin"


def make_checkpoint(
    root: Path, step: int, numbers: int = 8, *, fence: Fence = UNFENCED, **said: Any
) -> Checkpoint:
    """`said` goes into the manifest."""
    shard = write_file(begin(root, step, fence) / SHARD, bytes([step % 256]) * 4 * numbers)
    piece = Piece((0,), (numbers,), SHARD, 0)
    index = {"x": StoredTensor(torch.float32, (numbers,), (piece,))}
    values: dict[str, Any] = {
        **{"position": step, "tokens": step * 100, "loss": 1.5, "global_batch": 4, "seed": 0},
        **{"world_size": 1, "loss_scale": None, "versions": {}, "created": 0.0},
    }
    manifest = Manifest(step=step, files={SHARD: shard}, **{**values, **said})
    return publish(root, manifest, dump_index(index), b"{}", fence)
