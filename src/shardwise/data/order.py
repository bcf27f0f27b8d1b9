"""The order in which sequences are read: a pure function of (seed, position).

Nothing is stored, so a resumed run needs only its step to go on with the same order.
"""

from __future__ import annotations

# Three rounds already hide the order of large sets; small ones have narrow halves to mix.
ROUNDS = 6
WORD = 2**64 - 1


def index_at(seed: int, position: int, length: int, shuffle: bool) -> int:
    """The sequence at a position. Epochs follow each other endlessly, and each reads every
    sequence once."""
    epoch, place = divmod(position, length)
    return shuffled(place, length, epoch_key(seed, epoch)) if shuffle else place


def epoch_key(seed: int, epoch: int) -> int:
    """Another key, and so another order, for each epoch."""
    return mix(mix(seed) + epoch)


def shuffled(place: int, length: int, key: int) -> int:
    """Where a keyed bijection of range(length) sends a place.

    A Feistel network permutes the next power of four. Its cycle is followed until it comes back
    below `length`, which makes it a bijection of the smaller range, in less than four steps on
    average.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    while True:
        place = feistel(place, half_bits, key)
        if place < length:
            return place


def feistel(value: int, half_bits: int, key: int) -> int:
    """A keyed bijection of range(4**half_bits)."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix(mix(key + turn) + right) & mask)
    return left << half_bits | right


def mix(value: int) -> int:
    """SplitMix64: spreads every bit of the input over 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)
