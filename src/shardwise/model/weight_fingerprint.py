"""A fingerprint that tells weights from others of the same shape without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.files import open_file, parse_json, read_json, sampled_digest
from shardwise.model.dcp_index import METADATA_NAME
from shardwise.model.stored import INDEX_NAME, TORCH_INDEX_NAME, find_weights
from shardwise.model.zero import MODEL_NAMES

# Training changes almost every value of a tensor, so the first ones are enough.
_TENSOR_BYTES = 4096
# With tens of thousands of experts, reading from each would take minutes on a network file system.
_MOST_READ = 4096
_LENGTH_BYTES = 8
# Far above any real header; a length beyond it is not safetensors.
_LONGEST_HEADER = 100 * 2**20


def fingerprint_weights(place: Path) -> str:
    """A hash of names, dtypes, shapes and first values. How tensors are spread over files does not
    count.

    Formats other than safetensors are hashed by the sizes of their files and samples of them.
    """
    files = weight_files(place)
    try:
        tensors = {name: (file, entry) for file in files for name, entry in _header(file).items()}
    except (ValueError, TypeError, AttributeError):
        # This is not safetensors. Whoever reads all of a damaged file reports it.
        return sampled_digest(files)
    digest = hashlib.sha256()
    stride = -(-len(tensors) // _MOST_READ) or 1
    for number, (name, (file, entry)) in enumerate(sorted(tensors.items())):
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        if number % stride == 0:
            begin, end = entry["data_offsets"]
            with open_file(file) as stream:
                stream.seek(begin)
                digest.update(stream.read(min(end - begin, _TENSOR_BYTES)))
    return digest.hexdigest()


def weight_files(place: Path) -> list[Path]:
    """All files that hold the weights of a directory or file."""
    found = find_weights(place)
    if found.name == METADATA_NAME or found.name in MODEL_NAMES:
        return sorted(path for path in found.parent.iterdir() if path.is_file())
    if found.name not in (INDEX_NAME, TORCH_INDEX_NAME):
        return [found]
    try:
        names = set(read_json(found)["weight_map"].values())
        return sorted(
            path for path in (found.parent / str(name) for name in names) if path.is_file()
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        return [found]  # told by whoever reads it


def _header(file: Path) -> dict[str, Any]:
    """The entries of a safetensors file, their offsets counted from its beginning."""
    with open_file(file) as stream:
        length = _length(stream)
        entries = parse_json(stream.read(length))
    entries.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    return {
        name: {
            "dtype": str(entry.get("dtype")),
            "shape": entry.get("shape"),
            "data_offsets": [start + int(offset) for offset in entry.get("data_offsets", (0, 0))],
        }
        for name, entry in entries.items()
    }


def _length(stream: BinaryIO) -> int:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if not 0 < length <= _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return length
