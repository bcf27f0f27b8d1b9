"""Seeds of torch's random generators."""

from __future__ import annotations

import hashlib

import torch


def seed_of(key: str) -> int:
    """A seed that the key alone decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def seed_generators(key: str) -> None:
    """Seed the generators of the CPU and of this process's GPU by a hash of `key`.

    `torch.manual_seed` would seed those of every kind of device. For a kind that is not in use it
    formats the whole call stack, about a millisecond each time, and there are two or three.
    """
    seed = seed_of(key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
