"""Whether a checkpoint is, byte for byte, what was written. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.files import fingerprint_of
from shardwise.checkpoint.manifest import MANIFEST_NAME, Damaged, read_manifest
from shardwise.checkpoint.places import read_places
from shardwise.checkpoint.store import Checkpoint


def check_checkpoint(path: Path) -> list[Damaged]:
    """Everything that is wrong with one checkpoint directory: manifest, files, index, strays."""
    try:
        checkpoint = Checkpoint(path, read_manifest(path))
    except Damaged as damage:
        return [damage]
    listed = {MANIFEST_NAME, *checkpoint.manifest.files}
    strays = [item.name for item in path.iterdir() if item.name not in listed]
    found = [Damaged(name, "does not belong to the checkpoint") for name in sorted(strays)]
    found += check_files(checkpoint, checkpoint.manifest.files)
    return found or check_index(path)


def check_files(checkpoint: Checkpoint, names: Iterable[str]) -> list[Damaged]:
    """Hash these files of a checkpoint and name every one that is not as it was written."""
    found = []
    for name in names:
        expected = checkpoint.manifest.files[name]
        try:
            actual = fingerprint_of(checkpoint.path / name)
        except OSError as error:
            found.append(Damaged(name, f"cannot be read: {error.strerror}"))
            continue
        if actual.bytes != expected.bytes:
            found.append(Damaged(name, f"has {actual.bytes} bytes, {expected.bytes} were written"))
        elif actual.sha256 != expected.sha256:
            found.append(Damaged(name, "its content has changed (sha256 differs)"))
    return found


def check_index(path: Path) -> list[Damaged]:
    """What is wrong with the index, if anything."""
    try:
        read_places(path)
    except Damaged as damage:
        return [damage]
    return []
