"""The bytes of an exchange between sites: those that are sent, and those that are kept."""

from __future__ import annotations

import math

from shardwise.config.schema import RunConfig

# Numbers of an exchange in int8 that share a scale.
INT8_BLOCK = 256
# Bytes of the outer parameters and their momentum, and of the pseudo-gradient and its copy that is
# exchanged.
_STATE_BYTES, _UNDER_WAY_BYTES = 8, 8


def outer_bytes(config: RunConfig) -> int:
    """Bytes for each parameter of a shard that stay through inner steps."""
    if config.num_sites == 1:
        return 0
    diloco = config.diloco
    under_way = -(-_UNDER_WAY_BYTES // diloco.fragments) if diloco.overlap_steps else 0
    return _STATE_BYTES + under_way


def exchange_bytes(numbers: int, sites: int, exchange: str, *, is_ring: bool = True) -> int:
    """Bytes that a rank sends to exchange so many numbers with its twins. Without a ring it sends
    all of them to each."""
    if exchange == "int8":
        return (sites - 1) * (numbers + 4 * math.ceil(numbers / INT8_BLOCK))
    if not is_ring:
        return 4 * (sites - 1) * numbers
    # A ring sums parts, and then passes the sums on.
    return 2 * (sites - 1) * 4 * numbers // sites
