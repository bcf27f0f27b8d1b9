"""Which dim of a parameter is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.parallel.placement import choose_shard_dim, placement_over


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((4096, 4096), 32, 0),
        ((32001, 4096), 32, 0),  # a little padding
        ((60, 2816, 2048), 32, 0),  # 64 rows of 60
        ((40, 1024, 1536), 32, 1),  # 64 rows of 40
        ((8, 28672, 4096), 32, 1),  # Mixtral's experts
        ((8, 28672, 4096), 8, 0),
        ((8, 28672, 4096), 1, 0),
        ((8, 100, 4096), 32, 2),
        ((8, 100, 100), 32, 0),  # nothing divides
        ((2, 0, 64), 4, 2),
        ((3,), 4, 0),
        ((0, 4), 4, 0),
        ((), 4, 0),
    ],
)
def test_the_first_dim_unless_it_wastes(shape: tuple[int, ...], num_shards: int, dim: int) -> None:
    assert choose_shard_dim(shape, num_shards) == dim


def test_fully_shard_is_told() -> None:
    param = nn.Parameter(torch.empty(8, 64, 32, device="meta"))
    assert placement_over(16)(param) == Shard(1)
