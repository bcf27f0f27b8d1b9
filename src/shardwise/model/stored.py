"""Weight files on disk in all formats that are read, and which of them a directory holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.errors import UserError
from shardwise.files import read_json
from shardwise.model.boxes import Box
from shardwise.model.dcp import DcpWeights
from shardwise.model.dcp_index import METADATA_NAME
from shardwise.model.torch_file import load_torch
from shardwise.model.zero import MODEL_NAMES, ZeroWeights, find_checkpoint

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_NAME = "pytorch_model.bin"
# As Accelerate and the Trainer name what FSDP's FULL_STATE_DICT and SHARDED_STATE_DICT give.
FSDP_NAME = "pytorch_model_fsdp.bin"
FSDP_DIRECTORY = "pytorch_model_fsdp_0"
# In the order in which they are looked for.
_PLACES = (
    *(INDEX_NAME, SINGLE_NAME, TORCH_INDEX_NAME, TORCH_NAME, FSDP_NAME),
    *(f"{FSDP_DIRECTORY}/{METADATA_NAME}", METADATA_NAME),
)
# State of the run that made the weights. Nobody reads it here.
_OTHER_STATE = ("optimizer*", "scheduler*", "scaler*")


class StoredWeights(Protocol):
    """Tensors on disk by name; only the part that is asked for is read."""

    def keys(self) -> Iterable[str]:
        """All names."""

    def shape(self, key: str) -> list[int]:
        """The shape of the whole tensor."""

    def read(self, key: str, box: Box) -> Tensor:
        """This part of a tensor."""


class _Safetensors:
    """Safetensors files. Each read opens the file anew.

    A closed mapping gives its pages back, so peak memory stays at the shards plus one tensor's
    part.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def keys(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, key: str) -> list[int]:
        with _opened(self._files[key]) as file:
            return list(file.get_slice(key).get_shape())

    def read(self, key: str, box: Box) -> Tensor:
        with _opened(self._files[key]) as file:
            # A scalar cannot be sliced.
            found: Tensor = file.get_slice(key)[box.slices] if box.sizes else file.get_tensor(key)
            return found


class _TorchFiles:
    """`torch.save` files, memory-mapped: the system reads only the pages that are copied."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors = {key: value for path in paths for key, value in _map_torch(path).items()}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, key: str) -> list[int]:
        return list(self._tensors[key].shape)

    def read(self, key: str, box: Box) -> Tensor:
        return self._tensors[key][box.slices]


def find_weights(place: Path) -> Path:
    """The file that says what `place` holds: weights, an index of them, DCP's metadata, or the
    first file of a checkpoint of DeepSpeed."""
    found = [place] if place.is_file() else [place / name for name in _PLACES]
    for path in found:
        if path.is_file():
            return path
    if (first := find_checkpoint(place)) is not None:
        return first
    raise UserError(
        f"no weights in {place}",
        why=f"none of {', '.join(_PLACES)} is there",
        fix="save the model with save_pretrained, or name its weights: model.weights_from=DIR, or "
        "write model.weights=random",
    )


def open_weights(place: Path) -> StoredWeights:
    """What `save_pretrained`, Accelerate, DeepSpeed or DCP left in a directory, or one file of
    weights."""
    path = find_weights(place)
    if path.name == METADATA_NAME:
        return DcpWeights(path.parent)
    if path.name in MODEL_NAMES:
        return ZeroWeights(path.parent)
    if path.name == INDEX_NAME:
        return _Safetensors(_weight_map(path))
    if path.name == TORCH_INDEX_NAME:
        return _TorchFiles(sorted(set(_weight_map(path).values())))
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            return _Safetensors(dict.fromkeys(file.keys(), path))
    return _TorchFiles([path])


def unread_state(place: Path) -> list[str]:
    """Optimizer state and the like beside the weights of `place`, which is not read."""
    found = find_weights(place)
    directory = found.parent
    if found.name in MODEL_NAMES:
        # Its other files have the weights in fp32 too.
        return ["the optimizer and scheduler of DeepSpeed"]
    if directory.name == FSDP_DIRECTORY:
        directory = directory.parent
    return sorted(path.name for pattern in _OTHER_STATE for path in directory.glob(pattern))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file. The error names a file that is cut off or is not safetensors."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a whole file of weights",
            why=str(error),
            fix="fetch or save the weights anew, or name another copy: model.weights_from=DIR",
        ) from error


def _weight_map(index: Path) -> dict[str, Path]:
    try:
        names = read_json(index)["weight_map"]
        files = {str(key): _beside(index, name) for key, name in names.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{index} is not an index of weights",
            why=f"{type(error).__name__}: {error}",
            fix="fetch or save the weights anew",
        ) from error
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise UserError(
            f"{index} names {len(absent)} files that are not beside it",
            why=f"first of them: {absent[0]!r}",
            fix="fetch or save the weights anew",
        )
    return files


def _beside(index: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file beside it")
    return index.parent / name


def _map_torch(path: Path) -> dict[str, Tensor]:
    state = load_torch(path, path, mapped=True)
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(
            f"{path} is not a state dict",
            why="it must hold tensors by name and nothing else",
            fix="save model.state_dict() alone, or use save_pretrained",
        )
    return state
