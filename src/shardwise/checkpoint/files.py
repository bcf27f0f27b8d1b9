"""Files that survive a power cut, and their hashes: every write of a checkpoint comes here."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Size and content of a file."""

    bytes: int
    sha256: str


class HashedFile:
    """A new file that is hashed while it is written, and durable when it is closed."""

    def __init__(self, path: Path) -> None:
        # O_EXCL: nothing in a checkpoint is ever overwritten.
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._hash = hashlib.sha256()
        self.position = 0

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`, in pieces that let other threads breathe."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self._hash.update(piece)
            write_all(self._handle, piece)
        self.position += len(view)

    def fingerprint(self) -> Fingerprint:
        """Of everything written so far."""
        return Fingerprint(self.position, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                sync_handle(self._handle)
        finally:
            os.close(self._handle)


def write_all(handle: int, data: memoryview) -> None:
    """`os.write` may take less than it is given."""
    while len(data):
        data = data[os.write(handle, data) :]


def sync_handle(handle: int) -> None:
    """Wait until the disk has it."""
    os.fsync(handle)


def sync_directory(path: Path) -> None:
    """Make names durable: what was created in, renamed into or removed from `path`."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """The moment at which a directory becomes a checkpoint."""
    source.rename(target)


def write_file(path: Path, data: bytes) -> Fingerprint:
    """A whole small file."""
    with HashedFile(path) as file:
        file.write(data)
        return file.fingerprint()


def fingerprint_of(path: Path) -> Fingerprint:
    """Read a file again and hash it. Links are not followed: a checkpoint holds its own bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no plain file")
    with os.fdopen(handle, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Fingerprint(os.fstat(file.fileno()).st_size, digest.hexdigest())
