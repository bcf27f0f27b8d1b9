"""Several nodes beside each other: what should be the same on all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.doctor.check import Check

Told = Mapping[str, Any]
"""What `shardwise doctor --json` says of one node."""


def _field(name: str) -> Callable[[Told], tuple[str, ...]]:
    return lambda node: tuple(sorted({str(gpu.get(name, "-")) for gpu in node["gpus"]}))


def _differing(
    words: str, value: Callable[[Told], Hashable]
) -> Callable[[Sequence[Told]], Iterator[str]]:
    """One line where nodes differ in a value, with the hosts of each value."""

    def look(nodes: Sequence[Told]) -> Iterator[str]:
        hosts: dict[Hashable, list[str]] = defaultdict(list)
        for node in nodes:
            hosts[value(node)].append(str(node["host"]))
        if len(hosts) > 1:
            yield "; ".join(
                f"{words} {_shown(found)} on {', '.join(names)}" for found, names in hosts.items()
            )

    return look


def _shown(value: Hashable) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _variables(node: Told) -> Hashable:
    return tuple(
        f"{name}={value}"
        for name, value in sorted(node["environ"].items())
        if name.startswith("NCCL_") and not name.endswith(("IFNAME", "HCA", "FILE"))
    )


NODES: tuple[Check[Sequence[Told]], ...] = (
    Check(
        "SW260", "error", "Nodes have different drivers",
        "A driver of another version is slower, or does not know what the others agree on.",
        "install the same driver on all nodes, or leave the odd one out",
        _differing("driver", _field("driver_version")),
    ),
    Check(
        "SW261", "error", "Nodes have different versions of NCCL",
        "Ranks of different versions hang or end with an internal error.",
        "install the same torch and nvidia-nccl package on all nodes",
        _differing("NCCL", lambda node: str(node["nccl"])),
    ),
    Check(
        "SW262", "warning", "Nodes have GPUs with different clocks",
        "All ranks wait for the slowest one.",
        "nvidia-smi --reset-applications-clocks on all nodes, or leave the odd one out",
        _differing("highest clock", _field("clocks.max.sm")),
    ),
    Check(
        "SW263", "warning", "Nodes have GPUs with different power limits",
        "All ranks wait for the one that may use least.",
        "nvidia-smi --power-limit WATTS on all nodes",
        _differing("power limit", _field("power.limit")),
    ),
    Check(
        "SW264", "error", "Nodes have different GPUs",
        "The plan counts with one kind, and all wait for the slowest.",
        "give the job nodes of one kind: --constraint of Slurm, a nodeSelector of Kubernetes",
        _differing("GPUs", lambda node: (len(node["gpus"]), *_field("name")(node))),
    ),
    Check(
        "SW265", "warning", "Nodes have different RDMA cards",
        "A node with fewer or slower cards holds all others up.",
        "compare ibstat on these nodes; leave the odd one out",
        _differing("rates", lambda node: tuple(sorted(port["rate"] for port in node["rdma"]))),
    ),
    Check(
        "SW266", "error", "Nodes have different NCCL variables",
        "Ranks that choose different algorithms or transports hang.",
        "set the same variables on every node, or none",
        _differing("variables", _variables),
    ),
)  # fmt: skip
