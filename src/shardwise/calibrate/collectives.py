"""How long the collectives of sharded training take over sizes, and the link that explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.calibrate.clock import Clock, Work
from shardwise.calibrate.fit import fit_link
from shardwise.facts.fabric import Collective, Library, Link, ring_load
from shardwise.units import KIB, MIB

_SIZES = {
    "cuda": (1 * MIB, 8 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    "cpu": (16 * KIB, 128 * KIB, 1 * MIB, 4 * MIB, 16 * MIB),
}
_KINDS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def measure_collectives(clock: Clock, group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Points of each collective; all groups of the machine work at the same time."""
    ranks = dist.get_world_size(group)
    for size in _SIZES[clock.device.type]:
        for kind in _KINDS:
            seconds = clock.seconds(_work(kind, size, clock.device, group))
            yield {"kind": kind, "ranks": ranks, "bytes": size, "seconds": seconds}


def fit_collectives(points: Sequence[dict[str, Any]], name: str, device: str) -> Link:
    """The link that comes nearest to all of them."""
    library: Library = "nccl" if device == "cuda" else "gloo"
    samples = [
        (*ring_load(library, point["kind"], point["bytes"], point["ranks"]), point["seconds"])
        for point in points
    ]
    hop_s, bytes_per_s = fit_link(samples)
    return Link(name=name, bytes_per_s=bytes_per_s, hop_s=hop_s)


def _work(kind: Collective, size: int, device: torch.device, group: dist.ProcessGroup) -> Work:
    whole = torch.zeros(size // 4, device=device)
    part = torch.zeros(size // 4 // dist.get_world_size(group), device=device)
    # 2.13 gives the first two new names that 2.11 does not have.
    works: dict[Collective, Work] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return works[kind]
