"""tensors.json: where each piece of each tensor lies. Plain JSON, checked before it is believed."""

from __future__ import annotations

import json
import re
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

from shardwise.checkpoint.manifest import INDEX_NAME, Damaged
from shardwise.model.boxes import Box, cover_once, validate_sizes

_SHARD_NAME = re.compile(r"rank-\d{5}\.bin")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class Piece(Box):
    """A box of a tensor, and the bytes that hold it."""

    file: str
    start: int


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
    """The index of a checkpoint directory; anything odd in it is Damaged, and nothing is run."""
    try:
        data = json.loads((directory / INDEX_NAME).read_bytes())
        index = {str(name): _tensor_of(entry) for name, entry in data.items()}
    except OSError as error:
        raise Damaged(INDEX_NAME, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(INDEX_NAME, f"is not an index: {error}") from error
    for name, tensor in index.items():
        _validate_pieces(directory, name, tensor)
    return index


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
    """What DCP's planner needs to know of a checkpoint to lay it over another mesh."""
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


def _tensor_of(entry: Mapping[str, Any]) -> StoredTensor:
    pieces = tuple(
        Piece(validate_sizes(offsets), validate_sizes(sizes), str(file), validate_sizes([start])[0])
        for offsets, sizes, file, start in entry["pieces"]
    )
    return StoredTensor(_DTYPES[entry["dtype"]], validate_sizes(entry["shape"]), pieces)


def _validate_pieces(directory: Path, name: str, tensor: StoredTensor) -> None:
    """Pieces lie inside their files and inside the tensor, and together are the whole of it."""
    for piece in tensor.pieces:
        if not _SHARD_NAME.fullmatch(piece.file):
            raise Damaged(INDEX_NAME, f"{name} lies in {piece.file!r}, which is no shard")
        end = piece.start + tensor.piece_bytes(piece)
        path = directory / piece.file
        if not piece.lies_in(tensor.shape) or path.is_symlink() or not path.is_file():
            raise Damaged(INDEX_NAME, f"{name} has a piece outside of its tensor or file")
        if end > path.stat().st_size:
            raise Damaged(INDEX_NAME, f"{name} ends at byte {end}, beyond {piece.file}")
    if not cover_once(tensor.shape, tensor.pieces):
        raise Damaged(INDEX_NAME, f"{name}: its pieces do not cover it once")
