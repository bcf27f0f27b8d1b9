"""How long the collectives of sharded training take by size, and the link that explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.calibrate.fit import fit_link
from shardwise.facts.collective_cost import Collective, Library, Link, ring_load
from shardwise.metrics.clock import Clock
from shardwise.units import KIB, MIB
from shardwise.verify.fabric.exchange import Exchange

_SIZES = {
    "cuda": (1 * MIB, 8 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    "cpu": (16 * KIB, 128 * KIB, 1 * MIB, 4 * MIB, 16 * MIB),
}
_KINDS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def measure_collectives(clock: Clock, group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Points of each collective. All groups of the machine run at the same time."""
    ranks = group.size()
    for size in _SIZES[clock.device.type]:
        for kind in _KINDS:
            seconds = clock.seconds(Exchange(kind, size, clock.device, group).run)
            yield {"kind": kind, "ranks": ranks, "bytes": size, "seconds": seconds}


def fit_collectives(points: Sequence[dict[str, Any]], name: str, device: str) -> Link:
    """The link that fits all points best."""
    library: Library = "nccl" if device == "cuda" else "gloo"
    samples = [
        (*ring_load(library, point["kind"], point["bytes"], point["ranks"]), point["seconds"])
        for point in points
    ]
    hop_s, bytes_per_s = fit_link(samples)
    return Link(name=name, bytes_per_s=bytes_per_s, hop_s=hop_s)
