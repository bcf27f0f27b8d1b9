"""A world of one process: it is rank 0 of any number of ranks, and the others do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist

from shardwise.internals.peerless import FakeStore


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where the ranks of a group are in the cluster: how many, and the stride between them."""

    ranks: int
    stride: int


@contextmanager
def rank_zero_of(world_size: int) -> Iterator[None]:
    """Let this process be rank 0 of `world_size` ranks while the block runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        place_of.cache_clear()


@cache
def place_of(group: dist.ProcessGroup) -> GroupPlace:
    """The ranks of `group`; groups of a mesh are evenly spaced."""
    ranks = dist.get_process_group_ranks(group)
    return GroupPlace(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
