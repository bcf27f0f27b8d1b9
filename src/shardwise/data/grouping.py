"""An order in which the sequences of a batch have similar lengths, so that little of it is padding.

Some batches' worth of sequences are drawn as without grouping, sorted by length and cut into
batches, which are then put into an order of their own. So a batch is random but for the lengths in
it, and each epoch has other batches. All of it is a pure function of seed and position.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.data.order import epoch_key, index_at, mix, shuffled

Numbers = NDArray[np.int64]
# More batches in a group make them more even, and less random.
_BATCHES = 32
# Few different lengths leave few holes in the memory of a device.
_PARTS = 16


class LengthOrder:
    """Which sequences each global batch holds, and how long it is."""

    def __init__(
        self, lengths: Numbers, seq_len: int, *, seed: int, shuffle: bool, global_batch: int
    ) -> None:
        self._lengths = lengths
        self._seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self._size = global_batch
        # Batches of one group follow each other.
        self._group = lru_cache(maxsize=2)(self._build_group)

    def batch(self, index: int) -> tuple[list[int], int]:
        """The sequences of a global batch, counted from 0, and the tokens of each that are read:
        all that count, and as little padding as the longest allows."""
        first = index * self._size
        found = [self._at(position) for position in range(first, first + self._size)]
        longest, step = int(self._lengths[found].max()), max(1, self._seq_len // _PARTS)
        return found, min(self._seq_len, -(-longest // step) * step)

    def padding_share(self) -> float:
        """The share of padding in the first batches."""
        used = room = 0
        for index in range(min(_BATCHES, max(1, len(self._lengths) // self._size))):
            found, length = self.batch(index)
            used += int(self._lengths[found].sum())
            room += len(found) * length
        return 1 - used / room

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self._lengths))
        number, inside = divmod(place, _BATCHES * self._size)
        return int(self._group(epoch, number)[inside])

    def _build_group(self, epoch: int, number: int) -> Numbers:
        count, size = len(self._lengths), _BATCHES * self._size
        begin = epoch * count
        places = range(begin + number * size, begin + min((number + 1) * size, count))
        drawn = np.array([index_at(self._seed, place, count, self._shuffle) for place in places])
        drawn = drawn[np.argsort(-self._lengths[drawn], kind="stable")]
        # What is left over at the end of an epoch is no batch of its own, and stays there.
        num_whole = len(drawn) // self._size
        key = mix(epoch_key(self._seed, epoch) + number)
        order = [shuffled(batch, num_whole, key) for batch in range(num_whole)]
        whole = drawn[: num_whole * self._size].reshape(num_whole, self._size)
        return np.concatenate([whole[order].reshape(-1), drawn[num_whole * self._size :]])
