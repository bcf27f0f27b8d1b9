"""tensors.json: where each piece of each tensor lies, as plain JSON that is checked before it is
used.

Needs no torch, so verifying a checkpoint does not wait for it. index.py has the same with torch's
dtypes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwise.checkpoint.durable_files import plain_size, read_small, validate_absent
from shardwise.checkpoint.manifest import INDEX_NAME, Damaged
from shardwise.files import parse_json
from shardwise.model.boxes import Box, Sizes, cover_once, validate_sizes

_SHARD_NAME = re.compile(r"rank-\d{5}\.bin")
# One line for each piece: this allows thousands of ranks.
_MAX_BYTES = 2**30
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
    """The tensors of a checkpoint directory. Anything odd is Damaged, and no code runs."""
    try:
        data = parse_json(read_small(directory / INDEX_NAME, _MAX_BYTES).decode("utf-8"))
        tensors = {str(name): _tensor_of(entry) for name, entry in data.items()}
    except OSError as error:
        validate_absent(directory / INDEX_NAME, error)
        raise Damaged(INDEX_NAME, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(INDEX_NAME, f"is not an index: {error}") from error
    files = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
    sizes = {file: plain_size(directory / file) for file in files if _SHARD_NAME.fullmatch(file)}
    for name, tensor in tensors.items():
        _validate_pieces(name, tensor, sizes)
    _validate_apart(tensors)
    return tensors


def _tensor_of(entry: Mapping[str, Any]) -> PlacedTensor:
    pieces = tuple(
        Piece(validate_sizes(offsets), validate_sizes(sizes), str(file), validate_sizes([start])[0])
        for offsets, sizes, file, start in entry["pieces"]
    )
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"no dtype is called {entry['dtype']!r}")
    return PlacedTensor(entry["dtype"], validate_sizes(entry["shape"]), pieces)


def _validate_pieces(name: str, tensor: PlacedTensor, file_sizes: Mapping[str, int | None]) -> None:
    """Raise unless pieces lie inside their files and inside the tensor, and cover it."""
    for piece in tensor.pieces:
        if piece.file not in file_sizes:
            raise Damaged(INDEX_NAME, f"{name} lies in {piece.file!r}, which is not a shard")
        size = file_sizes[piece.file]
        if not piece.lies_in(tensor.shape) or size is None:
            raise Damaged(INDEX_NAME, f"{name} has a piece outside of its tensor or file")
        end = piece.start + tensor.piece_bytes(piece)
        if end > size:
            raise Damaged(INDEX_NAME, f"{name} ends at byte {end}, beyond {piece.file}")
    if not cover_once(tensor.shape, tensor.pieces):
        raise Damaged(INDEX_NAME, f"{name}: its pieces do not cover each element once")


def _validate_apart(tensors: Mapping[str, PlacedTensor]) -> None:
    """Raise where two pieces share a byte: one of them would not be what was saved under its
    name."""
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            length = tensor.piece_bytes(piece)
            if length:
                spans[piece.file].append((piece.start, piece.start + length, name))
    for file, found in spans.items():
        found.sort()
        for (_, end, before), (start, _, name) in pairwise(found):
            if start < end:
                raise Damaged(INDEX_NAME, f"{before} and {name} share bytes of {file}")
