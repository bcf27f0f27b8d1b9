"""Several sets of sequences read as one, in proportion to their weights.

Which set is read at a position, and how often it was read before, is arithmetic: nothing is stored,
so a run that resumes at a position reads on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.data.order import epoch_key, index_at, shuffled
from shardwise.data.sequences import Sequence as Row
from shardwise.data.sequences import SequenceSet

# More than any run reads.
ENDLESS = 1 << 40
_WHOLE = 1 << 32
# Within so many positions every set is read as often as its weight says, in a random order.
_BLOCK = 1024


class MixedSequences:
    """Sequences by position: each belongs to one set, which starts again when it is through."""

    def __init__(
        self,
        sets: Sequence[SequenceSet],
        shares: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        length: int = ENDLESS,
    ) -> None:
        self.seq_len = sets[0].seq_len
        self._sets = sets
        self._seed, self._shuffle, self._length = seed, shuffle, length
        # The share of each set among itself and those after it, in whole numbers: sums of floats
        # would depend on the position.
        left = [sum(shares[number:]) for number in range(len(shares))]
        self._parts = [round(_WHOLE * own / rest) for own, rest in zip(shares, left, strict=True)]

    def __len__(self) -> int:
        return self._length

    def get(self, index: int) -> Row:
        """The sequence at a position."""
        number, turn = self.place(index)
        chosen = self._sets[number]
        return chosen.get(index_at(self._seed, turn, len(chosen), self._shuffle))

    def place(self, index: int) -> tuple[int, int]:
        """The number of the set that is read at a position, and how often it was read before."""
        if self._shuffle:
            block, inside = divmod(index, _BLOCK)
            index = block * _BLOCK + shuffled(inside, _BLOCK, epoch_key(self._seed, block))
        for number, part in enumerate(self._parts):
            before = _turns(index, part)
            if _turns(index + 1, part) > before:
                return number, before
            index -= before
        raise IndexError(f"no set of {len(self._sets)} has position {index}")


def _turns(positions: int, part: int) -> int:
    """How many of the first positions fall to a set with this part of them: never more than half a
    turn from its share."""
    return (positions * part + _WHOLE // 2) // _WHOLE
