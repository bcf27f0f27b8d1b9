"""The size of weights that stay in MXFP4 as they were published: four bits for each, and a byte for
32 of them, in the same row of bytes.

A row of a weight becomes one row of bytes: the blocks of the file, two weights in each byte, then
its scales, one byte for each block, then zeros. A row needs no other row, so a rank can read and
keep its own rows alone.
"""

from __future__ import annotations

BLOCK = 32
"""Weights that share a scale."""

# Rows begin at multiples of this, which a GPU reads at once.
_ALIGNED = 16


def row_bytes(width: int) -> int:
    """The bytes of a row of `width` weights, which are whole blocks."""
    used = width // 2 + width // BLOCK
    return -(-used // _ALIGNED) * _ALIGNED


def width_of(num_bytes: int) -> int:
    """The weights of a row of so many bytes. A block has 17 of them, and fewer are padding, so no
    two widths have as many."""
    return num_bytes // (BLOCK // 2 + 1) * BLOCK
