"""Paths as users write them, files that are there whole or not at all, and what tells two apart."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO

# Of Linux's file systems: bytes in one name, and in a whole path with the NUL at its end.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
# Of a whole number of 64 bits, with its sign.
_MAX_DIGITS = 21
# Of lists within lists: nothing that is read here has a tenth of it, and whoever walks over a tree
# takes a few of Python's thousand calls for each level.
_MAX_DEPTH = 64
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def user_path(text: str) -> Path:
    """A path that a user wrote. `~` is the home directory; where there is none to be found,
    as for `~nobody`, it stays a name like any other."""
    return Path(os.path.expanduser(text))


def cache_folder(name: str) -> Path:
    """A folder in $SHARDWISE_CACHE, or in `shardwise` of the user's cache directory."""
    if own := os.environ.get("SHARDWISE_CACHE"):
        return Path(own) / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shardwise" / name


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


def open_file(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """A plain file of at most `max_bytes`, to be read; OSError for anything else.

    To open a pipe may wait for ever, a device may never end, and to open some is an act.
    """
    with _as_os_error(path):
        _validate_plain(path, os.stat(path))
        # It may have become a pipe since then, which this does not wait for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    try:
        found = os.fstat(handle)
        _validate_plain(path, found)
        if max_bytes is not None and found.st_size > max_bytes:
            reason = f"it has {found.st_size} bytes, where at most {max_bytes} are expected"
            raise OSError(errno.EFBIG, reason, str(path))
    except OSError:
        file.close()
        raise
    return file


def bounded_lines(stream: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """Every line; a longer one is cut to `max_bytes`, so that no line fills the memory."""
    is_beginning = True
    while piece := stream.readline(max_bytes):
        if is_beginning:
            yield piece
        is_beginning = piece.endswith(b"\n")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """All of a plain file; OSError where it is none, is larger, or cannot be read."""
    with open_file(path, max_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_tail(path: Path, max_bytes: int = 2**20) -> bytes:
    """The end of a plain file: of a log, which may be of any size, it says what came last."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes)


def validate_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise OSError as `open_file`, for files that a library opens by their names."""
    open_file(path, max_bytes).close()


def read_json(path: Path, max_bytes: int = 2**28) -> Any:
    """What a JSON file says: OSError as `read_bytes`, ValueError where it is not JSON."""
    return parse_json(read_bytes(path, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """What JSON text says, or ValueError.

    Also ValueError: lists within lists by the dozen, which break who walks over them, and whole
    numbers of more than 64 bits, which nothing counts.
    """
    try:
        tree = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Most text has fewer brackets than levels are allowed, and need not be walked over.
    opening = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    if sum(map(text.count, opening)) > _MAX_DEPTH:  # type: ignore[arg-type]
        _validate_depth(tree)
    return tree


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Python refuses some paths before the system sees them."""
    try:
        yield
    except ValueError:
        reason = why_no_path(str(path)) or "it is no path"
        raise OSError(errno.EINVAL, reason, str(path)) from None


def _validate_plain(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind} and no plain file", str(path))


def _validate_depth(tree: Any) -> None:
    level = [tree] if isinstance(tree, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        level = [
            inner
            for node in level
            for inner in (node.values() if isinstance(node, dict) else node)
            if isinstance(inner, (dict, list))
        ]
    raise ValueError("it is nested too deeply")


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
            with open_file(path) as stream:
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
