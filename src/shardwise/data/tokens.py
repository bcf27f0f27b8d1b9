"""The tokens of documents on disk, with an end after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.arrays import ArrayFile, ArrayWriter


@dataclass(frozen=True, slots=True)
class TokenFile(ArrayFile):
    """Token ids on disk."""

    num_documents: int

    @property
    def num_tokens(self) -> int:
        """The ends of documents included."""
        return self.length


class TokenWriter(ArrayWriter):
    """Appends documents to a file."""

    num_documents = 0

    def append(self, ids: NDArray[Any], eos_id: int) -> None:
        """Add one document and its end."""
        self.write(np.append(ids, eos_id))
        self.num_documents += 1

    def written(self) -> TokenFile:
        """What the file holds now."""
        return TokenFile(self.path, self.dtype, self.length, self.sha256, self.num_documents)
