"""Measure a fabric as one of its ranks: collectives over groups and sizes, then pairs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.facts.collective_cost import Collective
from shardwise.files import read_bytes
from shardwise.metrics.clock import Clock, Patience
from shardwise.parallel.mesh import World
from shardwise.units import format_bytes
from shardwise.verify.fabric.exchange import Exchange
from shardwise.verify.fabric.found import Found, GroupName, Point, Request
from shardwise.verify.fabric.nccl_log import Transports, read_log
from shardwise.verify.fabric.pairs import measure_pairs

Say = Callable[[str], None]
# The size of the log that one rank writes in several days.
_MAX_LOG_BYTES = 2**28
_PATIENCE = Patience(load_s=0.2, rounds=1)


def measure_fabric(request: Request, log: Path | None, say: Say) -> Found:
    """Measure, as a collective call. Every rank returns the results of all. `log` is where NCCL
    writes on this rank."""
    cluster = request.cluster
    index = torch.cuda.current_device() if cluster.device == "cuda" else 0
    clock = Clock(torch.device(cluster.device, index), _PATIENCE, World.joined())
    points = []
    for name, group in _groups(clock.world, cluster.nvlink_domain):
        for kind in request.kinds:
            sizes = ", ".join(map(format_bytes, request.sizes))
            say(f"{kind} of {group.size()} ranks, {name}: {sizes}")
            points += [_point(clock, name, kind, size, group) for size in request.sizes]
    say(f"pairs: {format_bytes(request.sizes[-1])} from each to each")
    pairs = measure_pairs(clock, cluster.nvlink_domain, request.sizes[-1])
    return Found(
        hosts=tuple(clock.world.gather(_host())),
        points=tuple(points),
        pairs=tuple(pairs),
        transports=_transports(clock.world, log),
    )


def _groups(everyone: World, domain: int) -> Iterator[tuple[GroupName, dist.ProcessGroup]]:
    """The groups that have several ranks and are not the same as another."""
    world = everyone.size
    if domain > 1:
        starts = range(0, world, domain)
        members = [list(range(start, start + domain)) for start in starts]
        yield "inside", dist.new_subgroups_by_enumeration(members)[0]
    if world > domain:
        across = [list(range(first, world, domain)) for first in range(domain)]
        yield "between", dist.new_subgroups_by_enumeration(across)[0]
    if world > domain > 1:
        yield "all", everyone.group


def _point(
    clock: Clock, name: GroupName, kind: Collective, size: int, group: dist.ProcessGroup
) -> Point:
    """Measure one point. The first call opens connections, and its data is checked."""
    exchange = Exchange(kind, size, clock.device, group)
    exchange.fill()
    exchange.run()
    wrong = torch.zeros(clock.world.size, dtype=torch.int64)
    wrong[clock.world.rank] = exchange.wrong()
    dist.all_reduce(wrong, group=clock.world.group)
    exchange.clear()
    seconds = max(clock.one_round(exchange.run).seconds)
    found = tuple((rank, count) for rank, count in enumerate(wrong.tolist()) if count)
    return Point(name, kind, exchange.ranks, exchange.num_bytes, seconds, found)


def _host() -> str:
    """This host's name, and its address on the route to the first rank where a launcher has
    named that."""
    name, master = socket.gethostname(), os.environ.get("MASTER_ADDR")
    if master is None:
        return name
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        # A datagram socket sends nothing when it connects: it only looks up the route.
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return f"{name} {way.getsockname()[0]}"
    except OSError:
        return name


def _transports(world: World, log: Path | None) -> Transports | None:
    mine = None
    if log and log.is_file():
        mine = read_log(read_bytes(log, _MAX_LOG_BYTES).decode(errors="replace"))
    found = [each for each in world.gather(mine) if each is not None]
    return sum(found[1:], found[0]) if found else None
