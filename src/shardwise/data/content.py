"""Hashes of a source's files. A hashed file is read again only after someone has written to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.files import read_json, replace_file

# Hashing fewer bytes is as fast as looking their hash up.
WORTH_KEEPING_BYTES = 2**28


def hash_of(path: Path) -> str:
    """sha256 of all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(paths: Sequence[Path], cache_root: Path | None = None) -> list[str]:
    """sha256 of each file, with those of large sources kept under `cache_root`."""
    stamps = [_stamp(path) for path in paths]
    if cache_root is None or sum(path.stat().st_size for path in paths) < WORTH_KEEPING_BYTES:
        return [hash_of(path) for path in paths]
    name = hashlib.sha256("\n".join(map(str, paths)).encode()).hexdigest()[:24]
    place = cache_root / f"hashes-{name}.json"
    known = _read(place)
    found = [known.get(stamp) or hash_of(path) for stamp, path in zip(stamps, paths, strict=True)]
    now = dict(zip(stamps, found, strict=True))
    if now != known:
        # Where the hash cannot be kept, the next start computes it again.
        with suppress(OSError):
            cache_root.mkdir(parents=True, exist_ok=True)
            replace_file(place, json.dumps(now).encode())
    return found


def _stamp(path: Path) -> str:
    """A stamp that changes with every write.

    A program can set the time of the last write (mtime), but not the time at which it did so
    (ctime).
    """
    found = path.stat()
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return " ".join(map(str, (path, found.st_dev, found.st_ino, found.st_size, *times)))


def _read(place: Path) -> dict[str, str]:
    try:
        known = read_json(place)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
