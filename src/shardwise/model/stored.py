"""Weight files on disk: safetensors or one torch.save file, read tensor by tensor."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from shardwise.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_NAME = "pytorch_model.bin"


class StoredWeights(Protocol):
    """Tensors on disk by name; only the rows that are asked for are read."""

    def keys(self) -> Iterable[str]:
        """All names."""

    def shape(self, key: str) -> list[int]:
        """Of the whole tensor."""

    def read(self, key: str, rows: slice) -> Tensor:
        """These rows of a tensor; of a scalar, all of it."""


class _Safetensors:
    """Each read opens the file anew: a closed mapping gives its pages back, and peak memory
    stays at the shards plus one tensor's rows."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def keys(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, key: str) -> list[int]:
        with safe_open(self._files[key], framework="pt") as file:
            return list(file.get_slice(key).get_shape())

    def read(self, key: str, rows: slice) -> Tensor:
        with safe_open(self._files[key], framework="pt") as file:
            stored = file.get_slice(key)
            found: Tensor = stored[rows] if stored.get_shape() else file.get_tensor(key)
            return found


class _TorchFiles:
    """Files of `torch.save`, mapped: the system reads the rows that are copied, no others."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors = {key: value for path in paths for key, value in _map_torch(path).items()}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, key: str) -> list[int]:
        return list(self._tensors[key].shape)

    def read(self, key: str, rows: slice) -> Tensor:
        tensor = self._tensors[key]
        return tensor[rows] if tensor.dim() else tensor


def open_weights(directory: Path) -> StoredWeights:
    """What `save_pretrained` left there: safetensors, or else the older `pytorch_model.bin`."""
    if (index := directory / INDEX_NAME).exists():
        return _Safetensors(_weight_map(index))
    if (single := directory / SINGLE_NAME).exists():
        with safe_open(single, framework="pt") as file:
            return _Safetensors(dict.fromkeys(file.keys(), single))
    if (index := directory / TORCH_INDEX_NAME).exists():
        return _TorchFiles(sorted(set(_weight_map(index).values())))
    if (single := directory / TORCH_NAME).exists():
        return _TorchFiles([single])
    raise UserError(
        f"no safetensors weights in {directory}",
        why=f"none of {INDEX_NAME}, {SINGLE_NAME}, {TORCH_INDEX_NAME} and {TORCH_NAME} is there",
        fix="save the model with save_pretrained, or set model.weights=random",
    )


def _weight_map(index: Path) -> dict[str, Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return {key: index.parent / name for key, name in names.items()}


def _map_torch(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle may name tensors and plain containers, and runs nothing.
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot read {path}",
            why=str(error).strip().splitlines()[0],
            fix="load it where you trust it and save it anew with save_pretrained (safetensors)",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(
            f"{path} is not a state dict",
            why="it must hold tensors by name and nothing else",
            fix="save model.state_dict() alone, or use save_pretrained",
        )
    return state
