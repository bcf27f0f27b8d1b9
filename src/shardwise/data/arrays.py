"""Files of numbers: written as a stream, read through a memory map."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """Numbers on disk."""

    path: Path
    dtype: str
    length: int
    sha256: str
    """The hash of all bytes: the same wherever the same numbers lie."""

    def open(self) -> NDArray[Any]:
        """The numbers, memory-mapped: ranks share the pages, and each is read when it is used."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.length,))

    def is_whole(self) -> bool:
        """Whether the file on disk has the size that its index claims."""
        expected = self.length * np.dtype(self.dtype).itemsize
        return self.path.is_file() and self.path.stat().st_size == expected


class ArrayWriter:
    """Appends numbers to a file. When the block ends, the data is on the disk."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = dtype
        self.length = 0
        self._stream = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, values: NDArray[Any]) -> None:
        """Add numbers."""
        data = values.astype(self.dtype).tobytes()
        self._stream.write(data)
        self._hash.update(data)
        self.length += values.size

    @property
    def sha256(self) -> str:
        """The hash of what was written so far."""
        return self._hash.hexdigest()

    def file(self) -> ArrayFile:
        """What the file holds now."""
        return ArrayFile(self.path, self.dtype, self.length, self.sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()


def smallest_dtype(vocab_size: int) -> str:
    """Two bytes per token where the ids fit into them, else four."""
    return "uint16" if vocab_size <= 2**16 else "uint32"
