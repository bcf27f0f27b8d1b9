"""manifest.json: the scalars of a checkpoint, and the hash of every file beside it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint.durable_files import Fingerprint, read_small, validate_absent
from shardwise.checkpoint.eval_history import HeldOut, held_out_of
from shardwise.files import parse_json

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "tensors.json"
PLAN_NAME = "plan.json"
# Beside the manifest where someone signed it; see signature.py.
SIGNATURE_NAME = "manifest.hmac"
FORMAT = 1
_FILE_NAME = re.compile(r"rank-\d{5}\.bin|tensors\.json|plan\.json")
# What older versions did not write.
_LATER_TEXTS = ("data", "base")
_LATER = (*_LATER_TEXTS, "held_out", "shift")
# A manifest has a few kilobytes per rank; anything larger is not one.
_MAX_BYTES = 64 * 2**20


class Damaged(Exception):
    """A checkpoint is not what was written: which file, and how it differs."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Scalars of the run, versions, and files. It is written last and read first."""

    step: int
    position: int
    """Global batches read so far; more than `step` where batches were skipped."""

    tokens: int
    loss: float | None
    global_batch: int
    seed: int
    world_size: int
    loss_scale: dict[str, float] | None
    """State of fp16's loss scaler."""

    versions: dict[str, str]
    created: float
    files: dict[str, Fingerprint]

    data: str | None = None
    """The hash of the training tokens. None in checkpoints older than this field."""

    base: str | None = None
    """The identity of the frozen weights, which the checkpoint does not hold. None where it holds
    all."""

    held_out: HeldOut | None = None
    """What evaluations had found by this step. None where there was none."""

    shift: int | None = None
    """Sequences that every batch begins after the place that its number says, or before, where it
    is negative. None where the batch has always had one size."""

    @property
    def next_sequence(self) -> int:
        """How many sequences were read."""
        return self.position * self.global_batch + (self.shift or 0)

    @property
    def total_bytes(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """The canonical bytes of this manifest, with a digest of itself."""
        body = {"format": FORMAT, **asdict(self)}
        # As older versions spelt it.
        body = {k: v for k, v in body.items() if k not in _LATER or v is not None}
        return _spell({**body, "digest": _digest(body)})


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises Damaged, or Unreadable where that cannot be
    decided."""
    try:
        text = read_small(directory / MANIFEST_NAME, _MAX_BYTES)
        manifest = _manifest_of(parse_json(text.decode("utf-8")))
    except OSError as error:
        validate_absent(directory / MANIFEST_NAME, error)
        raise Damaged(MANIFEST_NAME, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(MANIFEST_NAME, f"is not a manifest: {error}") from error
    if text != manifest.to_bytes():
        raise Damaged(MANIFEST_NAME, "does not match its own digest")
    return manifest


def _manifest_of(data: Mapping[str, Any]) -> Manifest:
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')!r}; this version reads {FORMAT}")
    required = [item.name for item in fields(Manifest) if item.name not in _LATER]
    values = {name: data[name] for name in required}
    values |= {name: data.get(name) for name in _LATER}
    for name in values["files"]:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"lists a file that no checkpoint has: {name!r}")
    values["files"] = {name: Fingerprint(**entry) for name, entry in values["files"].items()}
    _validate_counts(values)
    if not _is_number(values["created"]):
        raise ValueError(f"created is {values['created']!r}")
    if values["loss"] is not None and not _is_number(values["loss"]):
        raise ValueError(f"loss is {values['loss']!r}")
    _validate_texts(values["versions"], *(values[name] for name in _LATER_TEXTS))
    if values["held_out"] is not None:
        values["held_out"] = held_out_of(values["held_out"])
    scale = values["loss_scale"]
    if scale is not None and not all(_is_number(scale[key]) for key in ("scale", "held")):
        raise ValueError(f"loss_scale is {scale!r}")
    for entry in values["files"].values():
        if type(entry.bytes) is not int or entry.bytes < 0 or type(entry.sha256) is not str:
            raise ValueError(f"a file is described as {entry!r}")
    return Manifest(**values)


def _validate_counts(values: Mapping[str, Any]) -> None:
    for name in ("step", "position", "tokens", "global_batch", "seed", "world_size"):
        if type(values[name]) is not int or values[name] < (name == "world_size"):
            raise ValueError(f"{name} is {values[name]!r}")
    if values["shift"] is not None and type(values["shift"]) is not int:
        raise ValueError(f"shift is {values['shift']!r}")


def _validate_texts(versions: Any, *texts: Any) -> None:
    if type(versions) is not dict or not all(type(text) is str for text in versions.values()):
        raise ValueError(f"versions is {versions!r}")
    for name, text in zip(_LATER_TEXTS, texts, strict=True):
        if text is not None and type(text) is not str:
            raise ValueError(f"{name} is {text!r}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _spell(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_spell(body)).hexdigest()
