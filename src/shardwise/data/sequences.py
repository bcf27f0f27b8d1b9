"""Training sequences by number: inputs, and as labels the tokens that follow them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.data.tokens import TokenFile

# What cross-entropy leaves out, by PyTorch's convention.
IGNORE_INDEX = -100
# The number of the document that fills the end of a sequence.
PADDING = -1


class ComparedRow(NamedTuple):
    """The documents of one sequence that are compared with each other or with a reference."""

    numbers: NDArray[np.int64]
    """The number of each document among all, in the order of `Sequence.starts`. Padding has
    PADDING."""

    preferred: NDArray[np.bool_]
    """Whether a document is preferred."""


class Sequence(NamedTuple):
    """The tokens of one row of a batch."""

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The token after each input, or IGNORE_INDEX."""

    starts: NDArray[np.int64] | None = None
    """The first token of each document, before which attention does not look; None where it always
    does."""

    compared: ComparedRow | None = None
    """Which documents these are; None where documents are not compared."""


class SequenceSet(Protocol):
    """Sequences of one length that can be read in any order."""

    @property
    def seq_len(self) -> int:
        """Tokens in each sequence."""

    def __len__(self) -> int: ...

    def get(self, index: int) -> Sequence:
        """One sequence. All have `starts`, or none has."""


class TokenSequences:
    """A token file, cut into windows that overlap by one token.

    The last token of a window is only a label there, and it is the first input of the next window.
    So every token of the file but the first is predicted exactly once.
    """

    def __init__(
        self, file: TokenFile, seq_len: int, eos_id: int, *, keeps_documents_apart: bool = False
    ) -> None:
        self.seq_len = seq_len
        self._keeps_documents_apart = keeps_documents_apart
        self._tokens = file.open()
        self._eos_id = eos_id

    def __len__(self) -> int:
        num_predictions = len(self._tokens) - 1
        return -(-num_predictions // self.seq_len)

    def get(self, index: int) -> Sequence:
        """One window; the last one of the file is padded with labels that do not count."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.seq_len
        window = self._tokens[start : start + self.seq_len + 1].astype(np.int64)
        inputs = np.full(self.seq_len, self._eos_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        num_predictions = len(window) - 1
        inputs[:num_predictions] = window[:-1]
        labels[:num_predictions] = window[1:]
        starts = starts_after(inputs, self._eos_id) if self._keeps_documents_apart else None
        return Sequence(inputs, labels, starts)


class SyntheticSequences:
    """Random tokens that (seed, index) alone decide; nothing is stored."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed % 2**64

    def __len__(self) -> int:
        """More than any run reads."""
        return 1 << 40

    def get(self, index: int) -> Sequence:
        """One sequence of its own random stream. Raw words are used, whose values NumPy never
        changes."""
        generator = np.random.Philox(key=np.array([self._seed, index], dtype=np.uint64))
        words = generator.random_raw(self.seq_len + 1)
        tokens = (words % np.uint64(self._vocab_size)).astype(np.int64)
        return Sequence(tokens[:-1], tokens[1:])


def starts_after(inputs: NDArray[np.int64], end_id: int) -> NDArray[np.int64]:
    """The first token of each document of one sequence, where documents end with `end_id`."""
    begins = np.ones(inputs.shape, dtype=bool)
    # Several ends in a row are padding, or documents without text. They do not count as documents.
    begins[1:] = (inputs[:-1] == end_id) & (inputs[1:] != end_id)
    return np.flatnonzero(begins)
