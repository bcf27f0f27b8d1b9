"""Where documents lie in a micro-batch, for attention that does not cross their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# `starts` has room for this many documents per sequence. Where there are more, its size is the next
# power of two, because the compiler makes a graph for each size.
_USUAL = 16


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one micro-batch, whose tokens form one row."""

    positions: torch.Tensor
    """The position of each token in its document, int64, [micro_batch, seq_len]."""

    starts: torch.Tensor
    """The index of the first token of each document, int32. The rest holds the number of tokens."""

    def pinned(self) -> Documents:
        """The same in page-locked memory."""
        return Documents(self.positions.pin_memory(), self.starts.pin_memory())


def place_documents(starts: Sequence[NDArray[np.int64]], seq_len: int) -> Documents:
    """The documents of a micro-batch, from the first tokens in each of its sequences. None goes
    from one sequence into the next."""
    size = len(starts) * seq_len
    firsts = np.concatenate([first + row * seq_len for row, first in enumerate(starts)])
    lengths = np.diff(firsts, append=size)
    positions = np.arange(size) - np.repeat(firsts, lengths)
    room = max(_USUAL * len(starts), 1 << (len(firsts) - 1).bit_length())
    flat = np.full(room + 1, size, dtype=np.int32)
    flat[: len(firsts)] = firsts
    return Documents(
        torch.from_numpy(positions.reshape(len(starts), seq_len)), torch.from_numpy(flat)
    )
