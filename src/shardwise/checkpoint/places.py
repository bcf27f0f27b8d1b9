"""tensors.json: where each piece of each tensor lies. Plain JSON, checked before it is believed.

Needs no torch, so that verifying a checkpoint does not wait for it; index.py has the same as
tensors of torch's dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import INDEX_NAME, Damaged
from shardwise.model.boxes import Box, Sizes, cover_once, validate_sizes

_SHARD_NAME = re.compile(r"rank-\d{5}\.bin")
# Bytes of one element, by torch's name of the dtype.
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


@dataclass(frozen=True, slots=True)
class Piece(Box):
    """A box of a tensor, and the bytes that hold it."""

    file: str
    start: int


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor as it was saved: its pieces cover it exactly."""

    dtype: str
    shape: Sizes
    pieces: tuple[Piece, ...]

    def piece_bytes(self, piece: Piece) -> int:
        """Length of a piece in its file."""
        return piece.num_elements * ITEM_BYTES[self.dtype]


def read_places(directory: Path) -> dict[str, PlacedTensor]:
    """The tensors of a checkpoint directory; anything odd is Damaged, and nothing is run."""
    try:
        data = json.loads((directory / INDEX_NAME).read_bytes())
        tensors = {str(name): _tensor_of(entry) for name, entry in data.items()}
    except OSError as error:
        raise Damaged(INDEX_NAME, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(INDEX_NAME, f"is not an index: {error}") from error
    for name, tensor in tensors.items():
        _validate_pieces(directory, name, tensor)
    return tensors


def _tensor_of(entry: Mapping[str, Any]) -> PlacedTensor:
    pieces = tuple(
        Piece(validate_sizes(offsets), validate_sizes(sizes), str(file), validate_sizes([start])[0])
        for offsets, sizes, file, start in entry["pieces"]
    )
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"no dtype is called {entry['dtype']!r}")
    return PlacedTensor(entry["dtype"], validate_sizes(entry["shape"]), pieces)


def _validate_pieces(directory: Path, name: str, tensor: PlacedTensor) -> None:
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
