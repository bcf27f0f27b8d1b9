"""The links of the emulated cluster: how long each collective would take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.facts.collective_cost import Collective as Kind
from shardwise.facts.collective_cost import Fabric
from shardwise.tunnel.world import GroupPlace


@dataclass(frozen=True, slots=True)
class Links:
    """A cluster's fabric, scaled by a factor."""

    fabric: Fabric
    """The fabric at that speed; not scaled where the speed is infinite."""

    speed: float

    @classmethod
    def of(cls, fabric: Fabric, speed: float = 1.0) -> Links:
        """Scale a fabric. Rates change with the speed, and the latency of a hop does not.

        At an infinite speed no time passes at all, and the fabric stays as it is.
        """
        if math.isinf(speed):
            return cls(fabric, speed)
        inside, between = (
            replace(link, bytes_per_s=speed * link.bytes_per_s)
            for link in (fabric.inside, fabric.between)
        )
        return cls(replace(fabric, inside=inside, between=between), speed)

    @property
    def are_free(self) -> bool:
        """Whether their speed is infinite."""
        return math.isinf(self.speed)

    def seconds(self, kind: Kind, num_bytes: int, place: GroupPlace) -> float:
        """The modelled time of one collective; `num_bytes` is the whole tensor's."""
        if self.are_free:
            return 0.0
        return self.fabric.seconds(kind, num_bytes, place.ranks, place.stride)
