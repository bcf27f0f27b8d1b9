"""Where documents lie in a micro-batch, for attention that does not cross their ends."""

from __future__ import annotations

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


def find_documents(inputs: NDArray[np.int64], end_id: int) -> Documents:
    """Find documents. One ends with `end_id`, and none goes from one sequence into the next."""
    begins = np.ones(inputs.shape, dtype=bool)
    # Several ends in a row are padding, or documents without text. They do not count as documents.
    begins[:, 1:] = (inputs[:, :-1] == end_id) & (inputs[:, 1:] != end_id)
    firsts = np.flatnonzero(begins)
    lengths = np.diff(firsts, append=inputs.size)
    positions = np.arange(inputs.size) - np.repeat(firsts, lengths)
    room = max(_USUAL * len(inputs), 1 << (len(firsts) - 1).bit_length())
    starts = np.full(room + 1, inputs.size, dtype=np.int32)
    starts[: len(firsts)] = firsts
    return Documents(torch.from_numpy(positions.reshape(inputs.shape)), torch.from_numpy(starts))
