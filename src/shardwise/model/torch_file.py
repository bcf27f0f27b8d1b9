"""`torch.save` files, opened so that a pickle in them can name tensors and runs nothing."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.errors import UserError

_REFUSED = re.compile(r"GLOBAL (\S+)")
# A broken or hostile file fails in the zip, in the pickle or in a tensor's sizes.
_LOAD_ERRORS = (
    *(RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError),
    *(TypeError, LookupError, AttributeError, AssertionError, MemoryError),
)


def load_torch(
    file: Path | BinaryIO, name: Path | str, *, device: str = "cpu", mapped: bool = False
) -> Any:
    """What `torch.save` wrote to `file`; errors call it `name`."""
    try:
        # weights_only: a pickle may name tensors and plain containers, and runs nothing.
        return torch.load(file, map_location=device, mmap=mapped, weights_only=True)
    except _LOAD_ERRORS as error:
        raise UserError(
            f"cannot read {name}",
            why=_reason(error),
            fix="load it where you trust it and save it anew with save_pretrained (safetensors)",
        ) from error


def _reason(error: Exception) -> str:
    """What was refused. torch's own message is a page that advises to run the file nevertheless."""
    if found := _REFUSED.search(str(error)):
        return f"it names {found[1]!r}, which is no part of a tensor; nothing in it was run"
    if isinstance(error, pickle.UnpicklingError):
        return "its pickle holds more than tensors; nothing in it was run"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
