"""The size of weights in NF4: four bits for each, and scales beside them in the same row of bytes.

A row of a weight becomes one row of bytes: two weights in each byte, then one byte for the scale of
each block, then zeros, and in the last four bytes the number that these scales are multiples of. A
row needs no other row, so a rank can quantise and keep its own rows alone.
"""

from __future__ import annotations

BLOCK = 64
"""Weights that share a scale."""

STEP_BYTES = 4
# Rows begin at multiples of this, which a GPU reads at once.
_ALIGNED = 16


def row_bytes(width: int) -> int:
    """The bytes of a row of `width` weights, which are whole blocks."""
    used = width // 2 + width // BLOCK + STEP_BYTES
    return -(-used // _ALIGNED) * _ALIGNED


def width_of(num_bytes: int) -> int:
    """The weights of a row of so many bytes. A block has 33 of them, and fewer are padding, so no
    two widths have as many."""
    return (num_bytes - STEP_BYTES) // (BLOCK // 2 + 1) * BLOCK
