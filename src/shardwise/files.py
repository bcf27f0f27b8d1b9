"""Paths as users write them, files that are there whole or not at all, and what tells two apart."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

# Of Linux's file systems: bytes in one name, and in a whole path with the NUL at its end.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
# Of a whole number of 64 bits, with its sign.
_MAX_DIGITS = 21


def user_path(text: str) -> Path:
    """A path that a user wrote. `~` is the home directory; where there is none to be found,
    as for `~nobody`, it stays a name like any other."""
    return Path(os.path.expanduser(text))


def why_no_path(text: str) -> str | None:
    """Why no file can have this path; None where one can."""
    if "\0" in text:
        return "it holds a NUL character"
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, which no file name can"
    if len(path) > _MAX_PATH_BYTES:
        return f"it has {len(path)} bytes, and a path has at most {_MAX_PATH_BYTES}"
    longest = max(map(len, path.split(b"/")))
    if longest > _MAX_NAME_BYTES:
        return f"a name in it has {longest} bytes, and a file's name at most {_MAX_NAME_BYTES}"
    return None


# Of each end and the middle of a file; more is read of none.
_SAMPLE_BYTES = 64 * 1024
# Of a set of more files the content of some is looked at, evenly spread, and the size of all.
_MOST_SAMPLED = 1024


def free_bytes(path: Path) -> int | None:
    """Room for files of this user at `path`, which need not exist yet; None where none is told."""
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        state = os.statvfs(there)
    except OSError:
        # Whoever writes there will hear of it in more detail.
        return None
    # Some file systems without a size of their own, of FUSE for example, fill in zeros.
    return state.f_bavail * state.f_frsize if state.f_blocks else None


def read_json(path: Path, max_bytes: int = 2**28) -> Any:
    """What a JSON file says: OSError where it cannot be read, ValueError where it is not one.

    Also ValueError: a pipe or a device, which might never end; a file larger than `max_bytes`;
    lists within lists by the thousand; whole numbers of more than 64 bits, which nothing counts.
    """
    if not path.is_file():
        # The system's own word for what is wrong, or ours for what is there but is no file.
        path.stat()
        raise ValueError("it is no plain file")
    if path.stat().st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return parse_json(path.read_bytes().decode("utf-8"))


def parse_json(text: str) -> Any:
    """What JSON text says, or ValueError."""
    try:
        return json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_int(digits: str) -> int:
    value = int(digits) if len(digits) <= _MAX_DIGITS else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the number {digits[:30]}… has more than 64 bits")
    return value


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, then rename: who reads `path` finds the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def sampled_digest(paths: Iterable[Path]) -> str:
    """A hash of the sizes of files and of samples of their content, in order; names do not count.

    It tells copies from other data in seconds, however large they are.
    """
    files = list(paths)
    stride = -(-len(files) // _MOST_SAMPLED) or 1
    digest = hashlib.sha256()
    for number, path in enumerate(files):
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        if number % stride == 0:
            with path.open("rb") as stream:
                # In a small file these overlap, which does no harm.
                for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                    stream.seek(max(0, start))
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def free_name(path: Path) -> Path:
    """The first of NAME-2, NAME-3, ... that is not there yet; a suffix such as .yaml stays last."""
    if not path.name:  # such as `.` and `/`
        path = path.resolve() if path.resolve().name else path / "copy"
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in names if not name.exists())
