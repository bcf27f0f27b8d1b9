"""What DCP writes and reads of each tensor on this rank.

DCP knows how FSDP2 shards a parameter, and nothing of the axes that have cut it before
(`model/cuts.py`). For those parameters the boxes are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.model.boxes import Box
from shardwise.model.weights import Portion


class StagedPlanner(DefaultSavePlanner):
    """Plans over the live tensors, whose layout does not change, and writes their staged copies."""

    def __init__(self, staged: Mapping[str, Tensor], kept: Mapping[str, Portion]) -> None:
        super().__init__(flatten_state_dict=False)
        self.staged = staged
        self.cut = _cut_ones(kept)
        self.boxes = _boxes_of(self.cut)

    def create_local_plan(self) -> SavePlan:
        """DCP's own plan for what FSDP2 alone shards, and an item for each box of the rest."""
        everything = self.state_dict
        self.state_dict = {n: each for n, each in everything.items() if n not in self.cut}
        items = super().create_local_plan().items
        self.state_dict = everything
        self.plan = SavePlan([*items, *_items_to_write(self.cut)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The staged copy of this rank's part, whatever the live tensor holds by now."""
        staged = self.staged[index.fqn]
        return staged[self.boxes[_key(index)].slices] if index.fqn in self.cut else staged


class PortionPlanner(DefaultLoadPlanner):
    """Plans what this rank reads of each tensor."""

    def __init__(self, kept: Mapping[str, Portion]) -> None:
        super().__init__(flatten_state_dict=False)
        self.cut = _cut_ones(kept)
        self.boxes = _boxes_of(self.cut)

    def create_local_plan(self) -> LoadPlan:
        """DCP's own plan for what FSDP2 alone shards, and items for each box of the rest."""
        everything = self.state_dict
        self.state_dict = {n: each for n, each in everything.items() if n not in self.cut}
        items = super().create_local_plan().items
        self.state_dict = everything
        for name, portion in self.cut.items():
            stored: Any = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            chunks = [_chunk(whole) for whole, _ in portion.places]
            items = [*items, *create_read_items_for_chunk_list(name, stored, chunks)]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory that is read into."""
        if index.fqn not in self.cut:
            return super().lookup_tensor(index)
        return self.cut[index.fqn].local[self.boxes[_key(index)].slices]


def _cut_ones(kept: Mapping[str, Portion]) -> dict[str, Portion]:
    return {name: portion for name, portion in kept.items() if portion.cut is not None}


def _boxes_of(cut: Mapping[str, Portion]) -> dict[tuple[str, tuple[int, ...]], Box]:
    """For each box of a whole tensor, by name and place: where this rank has it."""
    return {
        (name, whole.offsets): own for name, portion in cut.items() for whole, own in portion.places
    }


def _items_to_write(cut: Mapping[str, Portion]) -> Iterator[WriteItem]:
    for name, portion in cut.items():
        size, properties = torch.Size(portion.shape), TensorProperties(dtype=portion.dtype)
        for whole, _ in portion.places:
            chunk = _chunk(whole)
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            index = MetadataIndex(name, chunk.offsets)
            yield WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
