"""Checkpoints of one tensor or of a tiny model, written as any save is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.checkpoint.durable_files import write_file
from shardwise.checkpoint.index import Index, Piece, StoredTensor, dump_index
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.store import Checkpoint, begin, publish
from shardwise.lease.lease import UNFENCED, Fence

SHARD = "rank-00000.bin"
TINY: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 16, "hidden_size": 4, "intermediate_size": 4},
    **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
}


def make_checkpoint(
    root: Path,
    step: int,
    numbers: int = 8,
    *,
    fence: Fence = UNFENCED,
    plan: dict[str, Any] | None = None,
    **said: Any,
) -> Checkpoint:
    """`said` goes into the manifest."""
    piece = Piece((0,), (numbers,), SHARD, 0)
    index = {"x": StoredTensor(torch.float32, (numbers,), (piece,))}
    plan = plan or {"config": {}, "hf_config": {}, "choices": {}}
    return _publish(root, step, bytes([step % 256]) * 4 * numbers, index, plan, fence, said)


def make_model_checkpoint(
    root: Path, step: int, num_bytes: int = 4096, *, fence: Fence = UNFENCED, **said: Any
) -> Checkpoint:
    """Of a model that its plan describes; its one shard is padded to `num_bytes`."""
    plan = {"config": {}, "hf_config": TINY, "choices": {}}
    data = bytes([step % 256]) * num_bytes
    return _publish(root, step, data, model_index(), plan, fence, said)


@cache
def model_index() -> Index:
    """The tensors of the tiny model, one behind the other."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY), dtype=torch.float32)
    index, start = {}, 0
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        piece = Piece((0,) * len(shape), shape, SHARD, start)
        index[f"model.{name}"] = StoredTensor(torch.float32, shape, (piece,))
        start += tensor.nbytes
    return index


def _publish(
    root: Path,
    step: int,
    data: bytes,
    index: Index,
    plan: dict[str, Any],
    fence: Fence,
    said: dict[str, Any],
) -> Checkpoint:
    shard = write_file(begin(root, step, fence) / SHARD, data)
    values: dict[str, Any] = {
        **{"position": step, "tokens": step * 100, "loss": 1.5, "global_batch": 4, "seed": 0},
        **{"world_size": 1, "loss_scale": None, "versions": {}, "created": 0.0},
    }
    manifest = Manifest(step=step, files={SHARD: shard}, **{**values, **said})
    return publish(root, manifest, dump_index(index), json.dumps(plan).encode(), fence)
