"""Directories of torch.distributed.checkpoint as first weights, in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement
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
from shardwise.model.boxes import Box, whole_box
from shardwise.model.stored import StoredWeights, open_weights


def boxes_of(shape: Iterable[int]) -> Iterator[Box]:
    """The whole, and in each dim parts of it: the first, some, none, the last."""
    whole = whole_box(shape)
    yield whole
    for dim, size in enumerate(whole.sizes):
        for start, stop in ((0, 1), (1, 3), (2, 2), (size // 2, size)):
            cut = list(zip(whole.offsets, whole.sizes, strict=True))
            cut[dim] = (min(start, size), max(min(stop, size) - start, 0))
            yield Box(tuple(a for a, _ in cut), tuple(length for _, length in cut))


def assert_holds(weights: StoredWeights, state: dict[str, Tensor]) -> None:
    assert set(weights.keys()) == set(state)
    for name, tensor in state.items():
        assert weights.shape(name) == list(tensor.shape)
        for box in boxes_of(tensor.shape):
            found = weights.read(name, box)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor[box.slices]), (name, box)


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
    for first, last in combinations_with_replacement(range(8), 2):
        for left, right in combinations_with_replacement(range(6), 2):
            box = Box((first, left), (last - first, right - left))
            assert torch.equal(weights.read("whole", box), whole[first:last, left:right])


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


@pytest.mark.parametrize("dim", [0, 1])
def test_only_what_is_asked_for_is_read(
    dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [4, 4, 256]
    shape[dim] = 4096 // 4
    state = {"weight": torch.randn(shape)}
    weights = open_weights(save_dcp(tmp_path, state))
    counted = []
    read = dcp._FilePart.readinto

    def count(self: Any, buffer: Any) -> int:
        counted.append(read(self, buffer))
        return counted[-1]

    monkeypatch.setattr(dcp._FilePart, "readinto", count)
    part = state["weight"].narrow(dim, 100, 10)
    offsets = tuple(100 if d == dim else 0 for d in range(3))
    assert torch.equal(weights.read("weight", Box(offsets, tuple(part.shape))), part)
    assert part.nbytes <= sum(counted) < part.nbytes + 22 * 1024  # of 4 MiB
