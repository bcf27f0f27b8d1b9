"""Directories of torch.distributed.checkpoint as first weights, in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_saves import STATE, change_metadata, save_dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedProperties
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from shardwise.model import dcp
from shardwise.model.stored import StoredWeights, open_weights

ROWS = (slice(None), slice(0, 1), slice(1, 3), slice(2, 2), slice(60, 99))


def assert_holds(weights: StoredWeights, state: dict[str, Tensor]) -> None:
    assert set(weights.keys()) == set(state)
    for name, tensor in state.items():
        assert weights.shape(name) == list(tensor.shape)
        for rows in ROWS:
            found = weights.read(name, rows)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor[rows] if tensor.dim() else tensor), (name, rows)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"app": {"model": state, "step": torch.tensor(7)}},
        lambda state: {"net": state},
        lambda state: {"model": state, "ema": {name: value * 0 for name, value in state.items()}},
        lambda state: {
            "model": state,
            "optimizer": {
                "state": {name: {"exp_avg": value * 0} for name, value in state.items()},
                "param_groups": [{"lr": 1e-3, "params": list(state)}],
            },
            "step": torch.tensor(7),
        },
    ],
    ids=["bare", "model", "state_dict", "nested", "other", "ema", "optimizer"],
)
def test_the_models_part_of_what_was_saved_is_read(wrap: Any, tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp", wrap(STATE))
    assert_holds(open_weights(tmp_path / "dcp"), STATE)


def test_accelerates_directory_is_found(tmp_path: Path) -> None:
    save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": STATE})
    assert_holds(open_weights(tmp_path), STATE)
    assert_holds(open_weights(tmp_path / "pytorch_model_fsdp_0"), STATE)


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """Two tensors become the rows, and two more the columns, of one: as on four ranks."""
    whole = torch.arange(35.0).view(7, 5)
    boxes = {(0, 0): (4, 3), (0, 3): (4, 2), (4, 0): (3, 3), (4, 3): (3, 2)}
    parts = {
        f"part{n}": whole[a : a + rows, b : b + columns].clone()
        for n, ((a, b), (rows, columns)) in enumerate(boxes.items())
    }
    save_dcp(tmp_path, parts)

    def merge(metadata: Metadata) -> None:
        entries: Any = metadata.state_dict_metadata
        first = entries["part0"]
        first.size = torch.Size([7, 5])
        first.chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes.items()
        ]
        metadata.state_dict_metadata = {"whole": first}
        metadata.planner_data = None
        metadata.storage_data = {
            MetadataIndex("whole", torch.Size(offsets)): place
            for offsets, place in zip(boxes, metadata.storage_data.values(), strict=True)
        }

    change_metadata(tmp_path, merge)
    weights = open_weights(tmp_path)
    for first in range(8):
        for last in range(first, 8):
            assert torch.equal(weights.read("whole", slice(first, last)), whole[first:last])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_of_older_releases_is_read(protocol: int, tmp_path: Path) -> None:
    """Before torch 2.3: ShardedTensor's properties, and fewer fields."""
    save_dcp(tmp_path, {"model": STATE})

    def age(metadata: Metadata) -> bytes:
        entries: Any = metadata.state_dict_metadata
        for entry in entries.values():
            entry.properties = ShardedProperties(dtype=entry.properties.dtype)
        for name in ("storage_meta", "version"):
            delattr(metadata, name)
        return pickle.dumps(metadata, protocol)

    change_metadata(tmp_path, age)
    assert_holds(open_weights(tmp_path), STATE)


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.randn(4096, 256)}
    weights = open_weights(save_dcp(tmp_path, state))
    counted = []
    read = dcp._Window.readinto

    def count(self: Any, buffer: Any) -> int:
        counted.append(read(self, buffer))
        return counted[-1]

    monkeypatch.setattr(dcp._Window, "readinto", count)
    assert torch.equal(weights.read("weight", slice(1000, 1010)), state["weight"][1000:1010])
    assert 10 * 1024 <= sum(counted) < 32 * 1024  # of 4 MiB
