"""The size of weights that stay in fp8 as they were published: one byte for each, and scales beside
them in the same row of bytes.

Files have one scale for a block of rows and columns. A row of a weight becomes one row of bytes:
the e4m3 numbers of the file, then the scale of each block of columns in fp32, then zeros. So rows
of one block hold copies of its scales: four bytes for 128 weights, 3.1% more than the numbers. In
return a row needs no other row, and a rank can read and keep its own rows alone.
"""

from __future__ import annotations

BLOCK = 128
"""Columns that share a scale."""

MULTIPLE = 8
"""Rows have multiples of so many weights, and so many bytes."""

SCALE_BYTES = 4


def num_blocks(width: int) -> int:
    """The scales of a row. The last block may be cut off."""
    return -(-width // BLOCK)


def row_bytes(width: int) -> int:
    """The bytes of a row of `width` weights."""
    used = width + SCALE_BYTES * num_blocks(width)
    return -(-used // MULTIPLE) * MULTIPLE


def width_of(num_bytes: int) -> int:
    """The weights of a row of so many bytes. More of them take more bytes, so no two widths have as
    many."""
    whole = num_bytes // (BLOCK + SCALE_BYTES)
    # Behind whole blocks comes a part of one, with its scale, and padding after it or none.
    left = num_bytes - whole * (BLOCK + SCALE_BYTES) - SCALE_BYTES
    return whole * BLOCK + max(0, left) // MULTIPLE * MULTIPLE
