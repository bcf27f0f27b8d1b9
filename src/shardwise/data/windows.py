"""Windows of conversations as training sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.data.conversations import StoredConversations, StoredSplit
from shardwise.data.sequences import IGNORE_INDEX, PADDING, ComparedRow, Sequence


class ConversationWindows:
    """The windows of one split. Labels are the tokens that are trained on."""

    def __init__(
        self,
        stored: StoredConversations,
        split: StoredSplit,
        seq_len: int,
        pad_id: int,
        *,
        keeps_documents_apart: bool,
    ) -> None:
        self.seq_len = seq_len
        self._tokens, self._mask = stored.tokens.open(), stored.mask.open()
        self._pieces, self._firsts = split.pieces.open().reshape(-1, 2), split.firsts.open()
        self._documents = None if stored.documents is None else stored.documents.open()
        self._preferred = None if stored.preferred is None else stored.preferred.open()
        self._pad_id = pad_id
        self._keeps_documents_apart = keeps_documents_apart

    def __len__(self) -> int:
        return len(self._firsts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each window, without padding."""
        ends = np.concatenate(([0], np.cumsum(np.diff(self._pieces)[:, 0])))
        return np.diff(ends[self._firsts])

    def get(self, index: int) -> Sequence:
        """One window. What conversations leave empty is a document of padding at its end."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        inputs = np.full(self.seq_len, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        starts, at = [], 0
        pieces = self._pieces[self._firsts[index] : self._firsts[index + 1]]
        for begin, end in pieces.tolist():
            inputs[at : at + end - begin] = self._tokens[begin:end]
            # The next conversation begins with a token that is never trained on, so the last label
            # counts only where a window has cut its conversation there.
            follows = self._tokens[begin + 1 : end + 1].astype(np.int64)
            is_trained = self._mask[begin + 1 : end + 1]
            labels[at : at + len(follows)] = np.where(is_trained, follows, IGNORE_INDEX)
            starts.append(at)
            at += end - begin
        if at < self.seq_len:
            starts.append(at)
        if not self._keeps_documents_apart:
            return Sequence(inputs, labels, None, self._compared(pieces[:, 0], 1))
        compared = self._compared(pieces[:, 0], len(starts))
        return Sequence(inputs, labels, np.array(starts, dtype=np.int64), compared)

    def _compared(self, begins: NDArray[np.int64], num_starts: int) -> ComparedRow | None:
        """The documents that begin at these tokens, and padding up to `num_starts`."""
        if self._documents is None or self._preferred is None:
            return None
        numbers = np.full(num_starts, PADDING, dtype=np.int64)
        preferred = np.zeros(num_starts, dtype=np.bool_)
        found = np.searchsorted(self._documents, begins)
        numbers[: len(found)], preferred[: len(found)] = found, self._preferred[found]
        return ComparedRow(numbers, preferred)
