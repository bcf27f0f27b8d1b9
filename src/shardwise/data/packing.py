"""Which conversations share a window, from their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.config.schema import DataConfig

Packing = Literal["best_fit", "one", "cut"]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Windows:
    """What each window holds, as places in the row of all tokens."""

    pieces: Numbers
    """The first token and the last + 1 of each piece, [num_pieces, 2]. A piece is a conversation,
    or a part of one where windows may cut it."""

    firsts: Numbers
    """The first piece of each window, and at the end the number of pieces."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(np.diff(self.pieces).sum())


def packing_of(config: DataConfig) -> Packing:
    """How conversations are packed; whole ones are, unless a user says otherwise."""
    return "best_fit" if config.packing == "auto" else config.packing


def pack(begins: Numbers, lengths: Numbers, seq_len: int, packing: Packing) -> Windows:
    """The windows of conversations, of which the first tokens and the lengths are given. The same
    lengths always give the same windows."""
    places = np.stack((begins, begins + lengths), axis=1)
    if packing == "cut":
        return _cut(places, seq_len)
    held = [[number] for number in range(len(lengths))]
    if packing == "best_fit":
        held = _best_fit(lengths.tolist(), seq_len)
    order = [number for window in held for number in window]
    return Windows(places[order], _firsts(len(window) for window in held))


def split_pairs(windows: Windows, documents: Numbers) -> Windows:
    """The same windows with two pieces for each pair. `documents` are the first tokens of all
    documents in the row, those of a pair one after the other."""
    begins, ends = windows.pieces[:, 0], windows.pieces[:, 1]
    middles = documents[np.searchsorted(documents, begins) + 1]
    halves = np.stack((begins, middles, middles, ends), axis=1)
    return Windows(halves.reshape(-1, 2), 2 * windows.firsts)


def _best_fit(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Longest first, each into the fullest window that has room for it.

    Windows are kept by the room that they have, of which there are at most `seq_len` different
    ones, so that a million conversations take seconds.
    """
    windows: list[list[int]] = []
    rooms: list[int] = []
    with_room: dict[int, list[int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, window = seq_len, len(windows)
            windows.append([])
        else:
            room = rooms[at]
            window = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        windows[window].append(number)
        left = room - length
        if left and left not in with_room:
            insort(rooms, left)
            with_room[left] = []
        if left:
            with_room[left].append(window)
    return windows


def _cut(places: Numbers, seq_len: int) -> Windows:
    """All conversations in a row, cut where a window ends."""
    pieces: list[tuple[int, int]] = []
    sizes = [0]
    room = seq_len
    for begin, end in places.tolist():
        while begin < end:
            if room == 0:
                sizes.append(0)
                room = seq_len
            stop = min(end, begin + room)
            pieces.append((begin, stop))
            sizes[-1] += 1
            room -= stop - begin
            begin = stop
    return Windows(np.array(pieces, dtype=np.int64).reshape(-1, 2), _firsts(sizes))


def _firsts(sizes: Iterable[int]) -> Numbers:
    return np.cumsum([0, *sizes], dtype=np.int64)
