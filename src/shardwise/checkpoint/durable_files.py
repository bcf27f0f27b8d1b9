"""Files that survive a power cut, and their hashes. Every write of a checkpoint comes here.

Readers tell two faults apart: a file that is not as it was written, and a file that cannot be read
now.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Self

from shardwise.errors import ExitCode, UserError

_CHUNK_BYTES = 16 * 2**20
# These errors mean that there is no plain file. Any other error is about the disk or the system:
# permissions, EIO, a server that does not answer, too many open files.
_ABSENT = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO),
    errno.ENAMETOOLONG,
}


class Unreadable(UserError):
    """A part of a checkpoint exists and cannot be read now, which says nothing about its bytes.

    It is never a reason to quarantine a checkpoint, or to begin without it.
    """

    reason: str = ""
    """Which file, and what the system says of it."""


def validate_absent(path: Path, error: OSError) -> None:
    """Raise Unreadable unless `error` says that there is no such plain file."""
    if error.errno not in _ABSENT:
        raise unreadable(path, error.strerror or str(error)) from error


def unreadable(path: Path, reason: str) -> Unreadable:
    """The error for a path that cannot be read."""
    error = Unreadable(
        f"{path} cannot be read: {reason}",
        why="it may be good, so it was not set aside, and the run does not begin without it",
        fix=f"make it readable for this user on this machine: ls -ld {quote(str(path))}; then run "
        "the same command again",
        code=ExitCode.ENVIRONMENT,
    )
    error.reason = f"{path.name}: {reason}"
    return error


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
        """Append all of `data`, in pieces between which other threads can run."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self._hash.update(piece)
            write_all(self._handle, piece)
        self.position += len(view)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of everything written so far."""
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
    """Write all of `data`: `os.write` may take less than it is given."""
    while len(data):
        data = data[os.write(handle, data) :]


def sync_handle(handle: int) -> None:
    """Wait until the data is on the disk."""
    os.fsync(handle)


def sync_directory(path: Path) -> None:
    """Make names durable: what was created in, renamed into or removed from `path`."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Rename a directory. At this moment it becomes a checkpoint."""
    source.rename(target)


def write_file(path: Path, data: bytes) -> Fingerprint:
    """Write a small file, durable on return."""
    with HashedFile(path) as file:
        file.write(data)
        return file.fingerprint()


def open_plain(path: Path) -> FileIO:
    """Open a plain file to read. Links are not followed, because a checkpoint holds its own
    bytes, and opening a pipe does not hang."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no plain file")
    return FileIO(handle, "rb")


def fingerprint_of(path: Path, *, from_disk: bool = False) -> Fingerprint:
    """Read a file again and hash it. `from_disk` bypasses the page cache where the system can.

    The file must be synced before, because dirty pages stay in the cache.
    """
    with open_plain(path) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256")
        return Fingerprint(os.fstat(file.fileno()).st_size, digest.hexdigest())


def fingerprint_of_bytes(data: bytes) -> Fingerprint:
    """The fingerprint of a file with this content."""
    return Fingerprint(len(data), hashlib.sha256(data).hexdigest())


def read_small(path: Path, max_bytes: int) -> bytes:
    """The content of a small file. Raises ValueError where it has more than `max_bytes`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"it is far too large: {size} bytes")
        return file.read()


def plain_size(path: Path) -> int | None:
    """The size of a plain file, or None where there is none. Raises Unreadable where that cannot
    be decided."""
    try:
        found = path.lstat()
    except OSError as error:
        validate_absent(path, error)
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def stats_below(directory: Path) -> Iterator[os.stat_result]:
    """The `lstat` of every file below a directory.

    A running job may remove any of them at the same time, and the directory too: `os.walk` passes
    over what is gone, where `Path.rglob` raises.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, name))
