"""A file that a run appends lines to, on a disk that may fail meanwhile."""

from __future__ import annotations

from contextlib import suppress
from io import FileIO
from pathlib import Path

_BREAK = b"\n"


class AppendedFile:
    """A file that is opened when it is needed, and again after a failure: its disk or server may
    come back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._is_cut = False
        with suppress(OSError):  # the first line tries again
            self._open()

    def append(self, line: bytes) -> None:
        """Write all of the line through to the disk, or raise OSError.

        A disk that fills up takes a part of a line, and the next line must not be joined to that
        part. A line that lacks only its line break can be read; the break is written before the
        next line.
        """
        file = self._open()
        data = _BREAK + line if self._is_cut else line
        try:
            while data:
                data = data[file.write(data) :]
                self._is_cut = bool(data)
        except OSError:
            self.close()
            if data != _BREAK:
                raise

    def close(self) -> None:
        """Close the file. An error at that moment has been reported before."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _open(self) -> FileIO:
        if self._file is None:
            # The file is unbuffered, so a line that could not be written does not appear with a
            # later one.
            self._file = self._path.open("ab", buffering=0)
            self._is_cut = not _ends_whole(self._path)
        return self._file


def _ends_whole(path: Path) -> bool:
    """A killed run, or a full disk, may have left half a line."""
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == _BREAK
