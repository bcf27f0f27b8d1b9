"""Whether a checkpoint is, byte for byte, what was written. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.checkpoint.durable_files import (
    Fingerprint,
    fingerprint_of,
    unreadable,
    validate_absent,
)
from shardwise.checkpoint.manifest import MANIFEST_NAME, SIGNATURE_NAME, Damaged, read_manifest
from shardwise.checkpoint.own_plan import read_own_plan
from shardwise.checkpoint.store import Checkpoint, validate_kept
from shardwise.checkpoint.tensor_places import read_places


def check_checkpoint(path: Path) -> list[Damaged]:
    """Everything that is wrong with one checkpoint directory: manifest, files, contents, strays.

    Raises Unreadable where that cannot be decided, and Pruned where the checkpoint was removed
    meanwhile.
    """
    found = _check(path)
    if found:
        validate_kept(path)
    return found


def check_files(checkpoint: Checkpoint, names: Iterable[str]) -> list[Damaged]:
    """Hash these files of a checkpoint and name every one that is not as it was written."""
    files = {name: checkpoint.manifest.files[name] for name in names}
    return check_written(checkpoint.path, files)


def check_written(
    directory: Path, files: Mapping[str, Fingerprint], *, from_disk: bool = False
) -> list[Damaged]:
    """Hash these files and name every one that does not have its fingerprint."""
    found = []
    for name, expected in files.items():
        try:
            actual = fingerprint_of(directory / name, from_disk=from_disk)
        except OSError as error:
            validate_absent(directory / name, error)
            found.append(Damaged(name, f"cannot be read: {error.strerror}"))
            continue
        if actual.bytes != expected.bytes:
            found.append(Damaged(name, f"has {actual.bytes} bytes, {expected.bytes} were written"))
        elif actual.sha256 != expected.sha256:
            found.append(Damaged(name, "its content has changed (sha256 differs)"))
    return found


def check_contents(path: Path) -> list[Damaged]:
    """What is wrong with the contents of the index or the plan. Their bytes may be as they were
    written, and still make no sense."""
    try:
        read_places(path)
        read_own_plan(path)
    except Damaged as damage:
        return [damage]
    return []


def _check(path: Path) -> list[Damaged]:
    try:
        checkpoint = Checkpoint(path, read_manifest(path))
    except Damaged as damage:
        return [damage]
    listed = {MANIFEST_NAME, SIGNATURE_NAME, *checkpoint.manifest.files}
    strays = [name for name in _names(path) if name not in listed]
    found = [Damaged(name, "does not belong to the checkpoint") for name in sorted(strays)]
    found += check_files(checkpoint, checkpoint.manifest.files)
    return found or check_contents(path)


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        validate_kept(path)
        raise unreadable(path, error.strerror or str(error)) from error
