"""The size of frozen weights in float8: one byte for each, and a scale in the same row of bytes.

A row of a weight becomes one row of bytes: one for each weight, then the exponent of the power of
two that they are multiplied by, then zeros. A row needs no other row, so a rank can cast and keep
its own rows alone.
"""

from __future__ import annotations

MULTIPLE = 16
"""Float8 matmuls take rows and columns in multiples of this."""

# Of the scale, so that every row begins at a multiple of 16 bytes, as matmuls want it.
_TAIL = 16


def row_bytes(width: int) -> int:
    """The bytes of a row of `width` weights."""
    return width + _TAIL


def width_of(num_bytes: int) -> int:
    """The weights of a row of so many bytes."""
    return num_bytes - _TAIL
