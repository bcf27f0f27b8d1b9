"""`.metadata` of PyTorch's DCP, which says where each piece of each tensor lies.

It is parsed and checked, and its pickle is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import UserError
from shardwise.internals.private_names import DCP_METADATA, STORAGE_INFO
from shardwise.model.boxes import Box, Sizes, cover_once, validate_sizes
from shardwise.model.pickled import Described, Name, read_pickle

METADATA_NAME = ".metadata"
# A piece takes about 200 bytes, so this allows a thousand tensors on five thousand ranks.
_MAX_METADATA_BYTES = 2**30
_MAX_DIMS = 64
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp")
# Keys under which a model is saved. Accelerate's own name comes first.
_MODEL_WORDS = ("model", "model_state_dict", "state_dict", "module")

_DTYPES = {
    Name("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *_DTYPES,
        Name("torch", "Size"),
        *(
            Name(_METADATA, name)
            for name in (
                *("Metadata", "MetadataIndex", "StorageMeta"),
                *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
                "TensorProperties",
            )
        ),
        *(Name(*private) for private in DCP_METADATA),
        # The directory that was saved to, and how Python 3.11 pickles a member of an enum.
        *(Name(module, "PosixPath") for module in ("pathlib", "pathlib._local")),
        *(Name(module, "WindowsPath") for module in ("pathlib", "pathlib._local")),
        Name("builtins", "getattr"),
    }
)


@dataclass(frozen=True, slots=True)
class DcpPiece(Box):
    """A box of a tensor, and the item of a file that holds it: a small file of `torch.save`."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor as DCP stored it: its pieces cover it exactly."""

    dtype: torch.dtype
    shape: Sizes
    pieces: tuple[DcpPiece, ...]


DcpIndex = dict[str, DcpTensor]
_Places = Mapping[tuple[str, Sizes | None], Mapping[str, Any]]


def read_dcp_index(directory: Path) -> DcpIndex:
    """The model's tensors by name. What was saved beside the model is left out.

    Before this returns, every piece is known to lie within a file of `directory`.
    """
    path = directory / METADATA_NAME
    try:
        metadata = _fields(read_pickle(_read_whole(path), _ALLOWED), "Metadata")
        index = _index_of(metadata)
        _validate_files(directory, index)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise UserError(
            f"cannot read {path}",
            why=f"{_reason(error)}; nothing in it was run",
            fix="save the checkpoint anew with torch.distributed.checkpoint (or Accelerate), or "
            "merge it where you trust it (`accelerate merge-weights`) and name the result",
        ) from error
    return index


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, ValueError):
        return str(error)
    return f"it is not what DCP writes ({type(error).__name__})"


def _read_whole(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_METADATA_BYTES:
        raise ValueError("it is not a regular file, or far too large")
    return path.read_bytes()


def _index_of(metadata: Mapping[str, Any]) -> DcpIndex:
    places = _places_of(metadata["storage_data"])
    tensors = {
        key: _tensor_of(key, _fields(entry, "TensorStorageMetadata"), places)
        for key, entry in _entries(metadata["state_dict_metadata"])
        if entry.made_by.name != "BytesStorageMetadata"
    }
    paths = _paths_of(tensors, metadata.get("planner_data"))
    model = _model_part(paths.values())
    return {
        ".".join(path[len(model) :]): tensors[key]
        for key, path in paths.items()
        if path[: len(model)] == model
    }


def _entries(values: Any) -> Iterable[tuple[str, Described]]:
    for key, entry in values.items():
        # Error messages show names as they are.
        if type(key) is not str or not key.isprintable() or type(entry) is not Described:
            raise ValueError("it describes something other than named tensors")
        yield key, entry


def _tensor_of(key: str, fields: Mapping[str, Any], places: _Places) -> DcpTensor:
    shape = _sizes(fields["size"])
    # A tuple of dtype, layout, requires_grad, memory format and pinning.
    dtype = _DTYPES[fields["properties"].state[0]]
    pieces = []
    for chunk in fields["chunks"]:
        described = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(described["offsets"]), _sizes(described["sizes"])
        place = places.get((key, offsets)) or places[key, None]
        start, length = validate_sizes([place["offset"], place["length"]])
        pieces.append(DcpPiece(offsets, sizes, place["relative_path"], start, length))
    if not all(piece.lies_in(shape) for piece in pieces) or not cover_once(shape, pieces):
        raise ValueError(f"the pieces of {key} do not cover it exactly once")
    return DcpTensor(dtype, shape, tuple(pieces))


def _places_of(storage_data: Any) -> _Places:
    """The bytes of each item, by the tensor's name and the offsets of its piece."""
    places: dict[tuple[str, Sizes | None], Mapping[str, Any]] = {}
    for key, value in storage_data.items():
        fields, place = _fields(key, "MetadataIndex"), _fields(value, STORAGE_INFO)
        offset = fields.get("offset")
        places[_text(fields["fqn"]), None if offset is None else _sizes(offset)] = place
        if place.get("transform_descriptors"):
            raise ValueError("its files went through an extension, such as compression")
    return places


def _paths_of(keys: Iterable[str], planner_data: Any) -> dict[str, tuple[str, ...]]:
    """The path of each tensor in the saved dictionary, such as ("model", "lm_head.weight").

    DCP joins paths by dots, after which a family's own `model.` looks the same.
    """
    known = planner_data if type(planner_data) is dict else {}
    paths = {}
    for key in keys:
        path = known.get(key, (key,))
        if type(path) is not tuple or not path or not all(type(p) in (str, int) for p in path):
            raise ValueError(f"it does not say where {key} was in the saved dictionary")
        paths[key] = tuple(str(part) for part in path)
    return paths


def _model_part(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The part of the saved dictionary that is the model."""
    above = [path[:-1] for path in paths]
    for word in _MODEL_WORDS:
        for parents in above:
            if word in parents:
                return parents[: parents.index(word) + 1]
    # A prefix of all tensors is a wrapper of some other name.
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*above, strict=False))
    return tuple(parts[0] for parts in shared)


def _validate_files(directory: Path, index: DcpIndex) -> None:
    """Raise unless items lie inside files of this directory, hold their piece, and share no bytes.

    Because they share no bytes, the size of the files bounds the memory that all tensors can need.
    """
    items: dict[str, list[tuple[int, int]]] = {}
    for key, tensor in index.items():
        for piece in tensor.pieces:
            if type(piece.file) is not str or not _FILE_NAME.fullmatch(piece.file):
                raise ValueError(f"{key} lies in {str(piece.file)[:200]!r}, which is no .distcp")
            if piece.num_elements * tensor.dtype.itemsize > piece.length:
                raise ValueError(f"{key} has a piece that is larger than its bytes in the file")
            items.setdefault(piece.file, []).append((piece.start, piece.start + piece.length))
    for name, ranges in items.items():
        file = directory / name
        if file.is_symlink() or not file.is_file():
            raise ValueError(f"{name} is missing, or is not a regular file")
        ranges.sort()
        if ranges[-1][1] > file.stat().st_size:
            raise ValueError(f"{name} is shorter than its items: it may have been cut")
        if any(end > start for (_, end), (start, _) in pairwise(ranges)):
            raise ValueError(f"{name} has items that share bytes")


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """The state of an object of class `name`."""
    if type(value) is not Described or value.made_by.name != name or type(value.state) is not dict:
        raise ValueError(f"it is not what DCP writes: a {name} is missing")
    return value.state


def _sizes(value: Any) -> Sizes:
    if type(value) is not Described or value.made_by != Name("torch", "Size"):
        raise ValueError("it is not what DCP writes: a torch.Size is missing")
    (values,) = value.args
    if len(values) > _MAX_DIMS:
        raise ValueError(f"it has a tensor of {len(values)} dims")
    return validate_sizes(values)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("the name of a tensor is not text")
    return value
