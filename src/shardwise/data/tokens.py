"""Files of token ids: written as a stream, read through a memory map."""

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
class TokenFile:
    """Token ids on disk."""

    path: Path
    dtype: str
    num_tokens: int
    num_documents: int
    sha256: str
    """The hash of all bytes: the same wherever the same tokens lie."""

    def open(self) -> NDArray[Any]:
        """The ids, memory-mapped: ranks share the pages, and each is read when it is used."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))

    def is_whole(self) -> bool:
        """Whether the file on disk has the size that its index claims."""
        expected = self.num_tokens * np.dtype(self.dtype).itemsize
        return self.path.is_file() and self.path.stat().st_size == expected


class TokenWriter:
    """Appends documents to a file. When the block ends, the data is on the disk."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        self._dtype = dtype
        self._stream = path.open("wb")
        self._hash = hashlib.sha256()
        self.num_tokens = 0
        self.num_documents = 0

    def append(self, ids: NDArray[Any], eos_id: int) -> None:
        """Add one document and its end."""
        data = np.append(ids, eos_id).astype(self._dtype).tobytes()
        self._stream.write(data)
        self._hash.update(data)
        self.num_tokens += len(ids) + 1
        self.num_documents += 1

    def written(self) -> TokenFile:
        """What the file holds now."""
        digest = self._hash.hexdigest()
        return TokenFile(self._path, self._dtype, self.num_tokens, self.num_documents, digest)

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
