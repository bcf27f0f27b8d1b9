"""Two nodes on one machine: network namespaces, joined by a link of a known speed.

A veth pair joins them, and `tc tbf` slows it down to so many Mbit/s. Ranks run in them under
torchrun's variables, as if they were on two machines. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from delayed_link import READY

NODES, RANKS_PER_NODE = 2, 2
CLUSTER = f"{NODES}x{RANKS_PER_NODE}xCPU"
DEVICE, PORT = "veth0", 29400
ADDRESSES = ("10.77.13.1", "10.77.13.2")
# tbf lets this much through at once; TCP's share of the rate needs a few milliseconds' worth.
BURST = "256kb"


def why_not_here() -> str | None:
    """None where namespaces and shaped links can be made."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing (apt install iproute2)"
    try:
        with two_nodes() as nodes:
            shape(nodes, 100)
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
    return None


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that see each other over a veth pair; gone when the block ends."""
    nodes = (f"shardwise-{os.getpid()}-a", f"shardwise-{os.getpid()}-b")
    try:
        for node in nodes:
            call("ip", "netns", "add", node)
        pair = ("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", nodes[1])
        call("ip", "-n", nodes[0], *pair)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            call("ip", "-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            call("ip", "-n", node, "link", "set", "lo", "up")
            call("ip", "-n", node, "link", "set", DEVICE, "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)


@contextmanager
def two_distant_nodes(speed: int, delay_ms: float) -> Iterator[tuple[str, str]]:
    """The same with a link of so many Mbit/s on which each packet takes so long."""
    nodes = (f"shardwise-{os.getpid()}-a", f"shardwise-{os.getpid()}-b")
    carrier = None
    try:
        for node in nodes:
            call("ip", "netns", "add", node)
        script = Path(__file__).with_name("delayed_link.py")
        words = [sys.executable, str(script), *nodes, str(speed), str(delay_ms)]
        carrier = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        if carrier.stdout is None or READY not in carrier.stdout.readline():
            raise RuntimeError("the link was not made")
        for node, address in zip(nodes, ADDRESSES, strict=True):
            call("ip", "-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            call("ip", "-n", node, "link", "set", "lo", "up")
            # A longer queue than 500 packets, so that none is lost while Python is busy.
            call("ip", "-n", node, "link", "set", DEVICE, "txqueuelen", "2000", "up")
        yield nodes
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.wait()
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)


def shape(nodes: Sequence[str], speed: int) -> None:
    """Let both directions carry `speed` Mbit/s."""
    for node in nodes:
        limits = ("rate", f"{speed}mbit", "burst", BURST, "latency", "100ms")
        call("tc", "-n", node, "qdisc", "replace", "dev", DEVICE, "root", "tbf", *limits)


def sent_bytes(node: str) -> int:
    """What a node has put on the link so far."""
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    return int(call("ip", "netns", "exec", node, "cat", path))


def run_ranks(
    nodes: Sequence[str], command: Sequence[str], folder: Path, per_node: int = RANKS_PER_NODE
) -> list[int]:
    """Exit codes of `command` on all ranks; what they say is in `rank-N.out` and `rank-N.err`."""
    ranks = [start_rank(nodes, rank, command, folder, per_node) for rank in range(NODES * per_node)]
    try:
        return [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def start_rank(
    nodes: Sequence[str], rank: int, command: Sequence[str], folder: Path, per_node: int
) -> subprocess.Popen[bytes]:
    """One rank, in its node."""
    node, local = divmod(rank, per_node)
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(NODES * per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        # What shardwise gives so many ranks of its own on this machine.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (NODES * per_node))),
    }
    out, err = folder / f"rank-{rank}.out", folder / f"rank-{rank}.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(
            ["ip", "netns", "exec", nodes[node], *command],
            env={**os.environ, **environ},
            stdout=stdout,
            stderr=stderr,
        )


def call(*command: str) -> str:
    """What a command prints; a CalledProcessError where it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
