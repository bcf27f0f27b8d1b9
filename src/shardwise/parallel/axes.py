"""The axes of a mesh: their order, who shares what along them, and where a rank is on them.

All of it is arithmetic: this module knows no process group and does not ask which rank this is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Neighbours on the last of these axes are neighbours in rank. `expert` is no factor of the world:
# its ranks are those of `shard`, `context` and `tensor`, over which the experts are divided.
FACTORS = ("site", "replicate", "pipeline", "shard", "context", "tensor")
AXES = (*FACTORS, "expert")
# Ranks along these axes read different sequences. All other ranks share a batch.
DATA_AXES = ("site", "replicate", "shard")
BATCH_AXES = tuple(name for name in FACTORS if name not in DATA_AXES)
# Ranks along these axes hold different tokens of one step. Sites make steps of their own.
TOKEN_AXES = ("replicate", "shard", "context")
# Ranks along these axes sum one loss. Only the last stage of a pipeline has a loss, and ranks along
# `tensor` all have the same one, which must count once.
LOSS_AXES = ("replicate", "pipeline", "shard", "context")
# Ranks along these axes make one step together.
STEP_AXES = ("replicate", "pipeline", "shard", "context", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The number of ranks along each axis. This is pure arithmetic and needs no process group."""

    site: int = 1
    replicate: int = 1
    pipeline: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole mesh."""
        return self.size(*FACTORS)

    def size(self, *names: str) -> int:
        """The number of ranks along these axes together."""
        return math.prod(getattr(self, name) for name in names)

    def place(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each factor of the world."""
        place = {}
        for name in reversed(FACTORS):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def index(self, rank: int, *names: str) -> int:
        """The index of a rank among those along these axes."""
        place, index = self.place(rank), 0
        for name in names:
            index = index * getattr(self, name) + place[name]
        return index

    def ranks_along(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes only, including itself."""
        fixed = [name for name in FACTORS if name not in names]
        own = self.index(rank, *fixed)
        everyone = range(self.num_ranks)
        return tuple(other for other in everyone if self.index(other, *fixed) == own)
