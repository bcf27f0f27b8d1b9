"""Files as streams of bytes, whatever they are compressed with."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from shardwise.errors import UserError, brief
from shardwise.files import open_file


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file. `.gz` and `.zst` are decompressed as they are read.

    A damaged file is an error that names it, wherever in the block the damage shows.
    """
    if path.suffix not in _OPENERS:
        with open_file(path) as stream:
            yield stream
        return
    try:
        with open_file(path) as packed, _OPENERS[path.suffix](packed) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        # Errors of the system have a number; those of decompressors have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> UserError:
    """A file that cannot be read as what its name says."""
    return UserError(
        f"data file {path} is damaged, or not what its suffix says",
        why=brief(error),
        fix="copy or download it again, or name other files: data.path=FILES",
    )


def _open_zstd(packed: IO[bytes]) -> Any:
    # pyarrow comes with the datasets library; Python has its own zstd from 3.14 on only.
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed), "zstd")
    return io.BufferedReader(stream, 1 << 20)


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".zst": _open_zstd}
