"""The directory of checkpoints: written aside, published by rename, never overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import ExitCode, UserError

MANIFEST_NAME = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself; written last, so a directory without one is not whole."""

    step: int
    tokens: int
    global_batch: int
    seed: int
    world_size: int
    loss: float | None
    files: dict[str, int]
    """Size in bytes of every file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint."""

    path: Path
    manifest: Manifest


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. Others are left alone and never chosen."""
    found = []
    for path in sorted(root.glob("step-*")):
        manifest = _read_manifest(path) if _NAME.fullmatch(path.name) else None
        if manifest is not None:
            found.append(Checkpoint(path, manifest))
    return found


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest by step, not by clock."""
    return max(list_checkpoints(root), key=lambda found: found.manifest.step, default=None)


def aside_path(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return root / f".writing-step-{step:08d}"


def final_path(root: Path, step: int) -> Path:
    """Where a checkpoint is found."""
    return root / f"step-{step:08d}"


def clear_aside(root: Path, step: int) -> Path:
    """An empty place to write to; what a killed run left there goes."""
    path = aside_path(root, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def file_sizes(path: Path) -> dict[str, int]:
    """Size of every file in a checkpoint directory."""
    return {item.name: item.stat().st_size for item in sorted(path.iterdir()) if item.is_file()}


def publish(root: Path, manifest: Manifest) -> Checkpoint:
    """Write the manifest, make everything durable, and rename into place."""
    aside, final = aside_path(root, manifest.step), final_path(root, manifest.step)
    text = json.dumps(asdict(manifest), indent=2) + "\n"
    (aside / MANIFEST_NAME).write_text(text, encoding="utf-8")
    for item in aside.iterdir():
        _sync(item)
    _sync(aside)
    if final.exists():
        raise UserError(
            f"{final} exists already; a checkpoint is never overwritten",
            fix="move it away, or resume from it",
            code=ExitCode.ENVIRONMENT,
        )
    aside.rename(final)
    _sync(root)
    return Checkpoint(final, manifest)


def prune(root: Path, keep: int) -> list[Path]:
    """Remove the oldest whole checkpoints beyond `keep`; returns what went."""
    old = list_checkpoints(root)[:-keep]
    for found in old:
        shutil.rmtree(found.path)
    return [found.path for found in old]


def _read_manifest(path: Path) -> Manifest | None:
    try:
        data = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        manifest = Manifest(**data)
    except (OSError, ValueError, TypeError):
        return None
    sizes = file_sizes(path)
    return manifest if all(sizes.get(n) == size for n, size in manifest.files.items()) else None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
