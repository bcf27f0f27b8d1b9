"""What is asked of a fabric and what was found in it, as plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Collective, bus_rate
from shardwise.verify.fabric.nccl_log import Transports

GroupName = Literal["inside", "between", "all"]
"""Ranks of one fast domain; ranks at the same place of all domains; all ranks."""

SOME_RANK = -1
"""Used where a file does not tell which rank it was."""

KINDS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure."""

    cluster: ClusterSpec
    kinds: tuple[Collective, ...]
    sizes: tuple[int, ...]
    """Bytes, rising."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"cluster": self.cluster.to_dict(), "kinds": self.kinds, "sizes": self.sizes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """Back from `to_dict`."""
        cluster = ClusterSpec.from_dict(data["cluster"])
        return cls(cluster, tuple(data["kinds"]), tuple(data["sizes"]))


@dataclass(frozen=True, slots=True)
class Point:
    """One collective at one size; all groups of its name worked at the same time."""

    group: GroupName
    kind: Collective
    ranks: int
    """The ranks of one group."""

    num_bytes: int
    """The whole tensor, as nccl-tests count it."""

    seconds: float
    """Seconds of one call, on the slowest rank."""

    wrong: tuple[tuple[int, int], ...] = ()
    """(rank, number of wrong elements) for every rank that received wrong data."""

    @property
    def algorithm_rate(self) -> float:
        """Bytes per second, as the caller sees it."""
        return self.num_bytes / self.seconds

    @property
    def bus_rate(self) -> float:
        """Bytes per second, as a link of the ring sees it."""
        return bus_rate(self.kind, self.num_bytes, self.ranks, self.seconds)


@dataclass(frozen=True, slots=True)
class Flow:
    """The transfer from one rank to another."""

    sender: int
    receiver: int
    seconds: float
    wrong: int = 0
    """The number of elements that arrived with wrong values."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One way between two ranks of a domain, or between all ranks of two domains at once."""

    group: Literal["inside", "between"]
    num_bytes: int
    """Bytes of each flow."""

    flows: tuple[Flow, ...]

    @property
    def rate(self) -> float:
        """Bytes per second of all flows together, until the last one has ended."""
        return self.num_bytes * len(self.flows) / self.slowest.seconds

    @property
    def slowest(self) -> Flow:
        """The slowest flow, which the others waited for."""
        return max(self.flows, key=lambda flow: flow.seconds)


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was measured, or read from files."""

    hosts: tuple[str, ...] = ()
    """Names of hosts, by rank."""

    points: tuple[Point, ...] = ()
    pairs: tuple[Pair, ...] = ()
    transports: Transports | None = None
    """What NCCL's log tells; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Found:
        """Back from `to_dict`."""
        return cls(
            hosts=tuple(data["hosts"]),
            points=tuple(
                Point(**{**each, "wrong": tuple((rank, count) for rank, count in each["wrong"])})
                for each in data["points"]
            ),
            pairs=tuple(
                Pair(**{**each, "flows": tuple(Flow(**flow) for flow in each["flows"])})
                for each in data["pairs"]
            ),
            transports=Transports.from_dict(data["transports"]) if data["transports"] else None,
        )
