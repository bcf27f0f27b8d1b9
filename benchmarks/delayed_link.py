"""A link with a rate and a delay between two network namespaces, made by a process of its own.

    python benchmarks/delayed_link.py NODE_A NODE_B MBITS DELAY_MS

Each namespace gets a TUN device, and the process carries packets from one to the other: each waits
for its turn at the rate, and then for the delay. `netem`, which does that in the kernel, is not in
every kernel. Packets that would wait longer than a quarter of a second for their turn are dropped,
as a router does. Needs Linux, root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_QUEUED_S = 0.25
READY = "the link is up"


def open_tun(node: str, device: str) -> int:
    """A descriptor of a new TUN device in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/var/run/netns") / node, os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {node}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        return tun
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(there)


@dataclass
class Way:
    """One direction of the link."""

    source: int
    target: int
    bits_per_s: float
    delay_s: float
    free_at: float = 0.0
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        """Queue all packets that have come."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            begin = max(now, self.free_at)
            if begin - now > _MOST_QUEUED_S:
                continue
            self.free_at = begin + 8 * len(packet) / self.bits_per_s
            self.queue.append((self.free_at + self.delay_s, packet))

    def give(self, now: float) -> None:
        """Hand over all packets that are due."""
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            # The other end is full, or not up yet: the packet is lost.
            with suppress(OSError):
                os.write(self.target, packet)


def carry(one: int, other: int, mbits: float, delay_ms: float) -> None:
    """Carry packets both ways, until this process ends."""
    rate, delay_s = mbits * 1e6, delay_ms / 1000
    ways = [Way(one, other, rate, delay_s), Way(other, one, rate, delay_s)]
    while True:
        due = min((way.queue[0][0] for way in ways if way.queue), default=None)
        wait_s = 1.0 if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([one, other], [], [], wait_s)
        now = time.monotonic()
        for way in ways:
            if way.source in readable:
                way.take(now)
            way.give(now)


def main() -> None:
    node_a, node_b, mbits, delay_ms = sys.argv[1:]
    tuns = [open_tun(node, "veth0") for node in (node_a, node_b)]
    print(READY, flush=True)
    carry(*tuns, float(mbits), float(delay_ms))


if __name__ == "__main__":
    main()
