"""The tensors of a checkpoint with torch's dtypes, and as the metadata that DCP plans with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.tensor_places import ITEM_BYTES, Piece, read_places

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it was saved: its pieces cover it exactly."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def piece_bytes(self, piece: Piece) -> int:
        """Length of a piece in its file."""
        return piece.num_elements * self.dtype.itemsize


Index = dict[str, StoredTensor]


def dump_index(index: Index) -> bytes:
    """The JSON of an index."""
    data = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "pieces": [[p.offsets, p.sizes, p.file, p.start] for p in tensor.pieces],
        }
        for name, tensor in index.items()
    }
    return json.dumps(data).encode()


def read_index(directory: Path) -> Index:
    """The index of a checkpoint directory. Anything odd in it is Damaged, and no code runs."""
    return {
        name: StoredTensor(_DTYPES[placed.dtype], placed.shape, placed.pieces)
        for name, placed in read_places(directory).items()
    }


def index_of_metadata(metadata: Metadata, starts: Mapping[MetadataIndex, tuple[str, int]]) -> Index:
    """DCP's plan of a save, with the place that each piece was written to."""
    index: Index = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor; only tensors are stored")
        pieces = tuple(
            Piece(tuple(c.offsets), tuple(c.sizes), *starts[MetadataIndex(name, c.offsets)])
            for c in entry.chunks
        )
        index[name] = StoredTensor(entry.properties.dtype, tuple(entry.size), pieces)
    return index


def metadata_of_index(index: Index) -> Metadata:
    """The metadata from which DCP's planner loads a checkpoint onto another mesh."""
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes))
                for p in tensor.pieces
            ],
        )
        for name, tensor in index.items()
    }
    return Metadata(state_dict_metadata=entries)
