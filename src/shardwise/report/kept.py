"""The checkpoints that are on the disk, judged by name, manifest and sizes; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.manifest import Damaged, Manifest, read_manifest

_NAME = re.compile(r"(?:(partial|quarantined)-)?step-(\d{8})(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint directory, whatever its state."""

    step: int
    state: str
    """good, damaged, partial or quarantined."""

    reason: str = ""
    num_bytes: int | None = None
    world_size: int | None = None
    loss: float | None = None
    created: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def list_kept(root: Path) -> list[KeptCheckpoint]:
    """All of them, by step."""
    found = []
    for path in sorted(root.glob("*step-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append(_judge(path, match.group(1), int(match.group(2))))
    return sorted(found, key=lambda kept: kept.step)


def _judge(path: Path, prefix: str | None, step: int) -> KeptCheckpoint:
    if prefix is not None:
        return KeptCheckpoint(step=step, state=prefix, reason=_reason(path))
    try:
        manifest = read_manifest(path)
    except Damaged as damage:
        return KeptCheckpoint(step=step, state="damaged", reason=str(damage))
    wrong = _wrong_size(path, manifest)
    return KeptCheckpoint(
        step=step,
        state="damaged" if wrong else "good",
        reason=wrong,
        num_bytes=manifest.total_bytes,
        world_size=manifest.world_size,
        loss=manifest.loss,
        created=manifest.created,
        versions=manifest.versions,
    )


def _wrong_size(path: Path, manifest: Manifest) -> str:
    for name, expected in manifest.files.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != expected.bytes:
            return f"{name} has {actual} bytes, {expected.bytes} were written"
    return ""


def _reason(path: Path) -> str:
    try:
        return (path / "reason.txt").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
