"""Which dim of a parameter is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.tensor import Shard

from shardwise.model.packed import is_packed
from shardwise.plan.strategy_mesh import MAX_PADDING, padding


def choose_shard_dim(shape: Sequence[int], num_shards: int) -> int:
    """The first dim, unless its padding is waste and a later dim divides evenly.

    FSDP2 pads dim 0 to a multiple of the ranks: 8 stacked experts over 32 ranks would be stored and
    moved four times. It does not pad later dims, so those have to divide.
    """
    if not shape or padding(shape[0], num_shards) <= MAX_PADDING:
        return 0
    even = (dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % num_shards == 0)
    return next(even, 0)


def placement_over(num_shards: int) -> Callable[[nn.Parameter], Shard]:
    """The function that `fully_shard` calls for each parameter."""

    def place(param: nn.Parameter) -> Shard:
        # The bytes of a row belong together.
        shape = param.shape[:-1] if is_packed(param) else param.shape
        return Shard(choose_shard_dim(shape, num_shards))

    return place
