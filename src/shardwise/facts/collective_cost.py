"""How long a collective takes: a latency for every hop of the ring, then bytes over a bandwidth.

A group inside one fast domain (a node, or the rack of an NVL72) moves at the rate of that domain's
links. A group that spans several domains shares the network cards of each node with the groups
beside it. The eight replica groups of HSDP, with one rank in each node, get an eighth of a node's
cards each, while one ring through all ranks has them to itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.facts.gpus import NODE, GpuSpec

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Library = Literal["nccl", "gloo"]

# How often a tensor goes around the ring. gloo has no reduce-scatter: torch all-reduces the whole
# tensor and keeps a part of it. `benchmarks/links.py` counts the bytes that cross a link.
_ROUNDS: dict[Library, dict[Collective, int]] = {
    "nccl": {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1},
    "gloo": {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 2, "all_to_all": 1},
}
# The share of a link's nominal rate that collectives reach with large messages.
NVLINK_SHARE = 0.82
PCIE_SHARE = 0.55
NETWORK_SHARE = 0.90
# TCP leaves this share of a network's bytes to gloo: 1448 of a frame of 1514.
TCP_SHARE = 0.956


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of connection, as seen by collectives."""

    name: str
    bytes_per_s: float
    """What large messages reach: per device inside a domain, per node between domains."""

    hop_s: float
    """The latency of each step of a ring, however small its message is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links of a cluster."""

    inside: Link
    """Between devices of one fast domain."""

    between: Link
    """Between domains; the rate is that of all the network cards of one domain together."""

    domain: int
    """Devices of one fast domain."""

    library: Library = "nccl"
    source: Literal["catalogue", "given", "measured"] = "catalogue"

    def seconds(self, kind: Collective, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Time of one collective over `ranks` devices, every `stride`-th of the cluster.

        `num_bytes` is the whole tensor: the output of an all-gather, the input of a reduce-scatter
        or an all-reduce, or what one rank holds before an all-to-all.
        """
        if ranks <= 1:
            return 0.0
        hops, moved = ring_load(self.library, kind, num_bytes, ranks)
        rate, hop_s = self._path(ranks, stride)
        members = max(1, self.domain // stride)
        if kind == "all_to_all" and members < ranks:
            # An all-to-all is no ring: what goes to other domains leaves each device through its
            # part of the cards.
            moved = num_bytes * (ranks - members) / ranks
            rate = min(self.inside.bytes_per_s, self.between.bytes_per_s / self.domain)
        return hops * hop_s + moved / rate

    def link_over(self, ranks: int, stride: int = 1) -> Link:
        """The link of the slowest part of such a ring."""
        return self.inside if ranks * stride <= self.domain else self.between

    def _path(self, ranks: int, stride: int) -> tuple[float, float]:
        """(bytes per second, seconds per hop) of the slowest part of the ring."""
        if self.link_over(ranks, stride) is self.inside:
            return self.inside.bytes_per_s, self.inside.hop_s
        members = max(1, self.domain // stride)
        cards = self.between.bytes_per_s * members / self.domain
        return min(self.inside.bytes_per_s, cards), self.between.hop_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fabric:
        """Back from `to_dict`."""
        return cls(**{**data, "inside": Link(**data["inside"]), "between": Link(**data["between"])})


def ring_load(
    library: Library, kind: Collective, num_bytes: float, ranks: int
) -> tuple[int, float]:
    """(hops, bytes that each rank passes on) of one collective over `ranks` devices."""
    rounds = _ROUNDS[library][kind]
    return rounds * (ranks - 1), rounds * num_bytes * (ranks - 1) / ranks


def bus_rate(kind: Collective, num_bytes: float, ranks: int, seconds: float) -> float:
    """Bus bandwidth as nccl-tests define it: what each rank of a ring passes on, per second.

    The definition is NCCL's whatever library did the work, so that figures can be compared.
    """
    return ring_load("nccl", kind, num_bytes, ranks)[1] / seconds


# Networks between nodes: bytes per second of all the cards of a usual node, one way.
_NETWORKS: dict[str, float] = {
    "infiniband-xdr": 800e9,
    "infiniband-ndr": 400e9,
    "infiniband-hdr": 200e9,
    "infiniband-edr": 50e9,
    "roce-400": 400e9,
    "roce-200": 200e9,
    "efa-3200": 400e9,
    "efa-1600": 200e9,
    "efa-400": 50e9,
    "gpudirect-tcpx": 100e9,
    "ethernet-400": 50e9,
    "ethernet-200": 25e9,
    "ethernet-100": 12.5e9,
    "ethernet-25": 3.125e9,
    "ethernet-10": 1.25e9,
    "ethernet-1": 0.125e9,
}
NETWORK_NAMES = tuple(_NETWORKS)
_HOP_S = {"infiniband": 8e-6, "roce": 9e-6, "efa": 12e-6, "gpudirect": 20e-6, "ethernet": 30e-6}
# What a server of such GPUs usually has.
_USUAL_NETWORK = {
    "H100": "infiniband-ndr",
    "H200": "infiniband-ndr",
    "B200": "infiniband-ndr",
    "GB200": "infiniband-ndr",
    "B300": "infiniband-xdr",
    "GB300": "infiniband-xdr",
    "H800": "infiniband-ndr",
    "H20": "roce-400",
    "A800-80GB": "infiniband-hdr",
    "MI300X": "roce-400",
    "MI325X": "roce-400",
    "MI355X": "roce-400",
    "A100-40GB": "infiniband-hdr",
    "A100-80GB": "infiniband-hdr",
    "V100-16GB": "infiniband-edr",
    "V100-32GB": "infiniband-edr",
}
_PCIE_GEN3, _PCIE_GEN4, _PCIE_GEN5 = 16e9, 32e9, 64e9
_PCIE = {
    "H100-PCIe": _PCIE_GEN5,
    "H100-NVL": _PCIE_GEN5,
    "RTX-5090": _PCIE_GEN5,
    "RTX-PRO-6000": _PCIE_GEN5,
    "RTX-PRO-6000-Server": _PCIE_GEN5,
    "T4": _PCIE_GEN3,
    # Two of them share the 16 lanes of a desktop board of their time. Later cards take up to four
    # slots, so that several stand in workstations and servers, which give each 16 lanes.
    "RTX-3090": _PCIE_GEN3 / 2,
}
# Ranks of one CPU exchange through gloo's sockets on the loopback device.
_LOOPBACK = Link(name="gloo over loopback", bytes_per_s=1.2e9, hop_s=150e-6)


def fabric_of(
    gpu: GpuSpec | None,
    domain: int,
    interconnect: str | float = "auto",
    inside: Link | None = None,
    between: Link | None = None,
) -> Fabric:
    """The links of a cluster of such GPUs, or of ranks on one CPU without a GPU.

    `inside` and `between` are measured links. A network that the user names takes precedence over
    `between`.
    """
    source: Literal["catalogue", "given", "measured"] = "catalogue"
    if interconnect != "auto":
        source = "given"
    if inside is not None:
        source = "measured"
    if gpu is None:
        near = inside or _LOOPBACK
        far = between or near if interconnect == "auto" else _tcp(interconnect, between or near)
        return Fabric(inside=near, between=far, domain=domain, library="gloo", source=source)
    usual = _USUAL_NETWORK.get(gpu.name, "ethernet-100")
    network = _network(usual if interconnect == "auto" else interconnect)
    far = between if between is not None and interconnect == "auto" else network
    return Fabric(inside=inside or _inside(gpu, domain), between=far, domain=domain, source=source)


def _inside(gpu: GpuSpec, domain: int) -> Link:
    # Bridges join a few cards of a node, so a ring through all of them also goes over PCIe.
    bridged = gpu.nvlink_domain < min(domain, NODE)
    if gpu.nvlink_bandwidth is not None and gpu.nvlink_domain > 1 and not bridged:
        rate = NVLINK_SHARE * gpu.nvlink_bandwidth
        return Link(name=f"NVLink of {gpu.name}", bytes_per_s=rate, hop_s=3e-6)
    # Devices on one host bridge share it both ways, so each gets half. GeForce drivers have no peer
    # access: one card writes to host memory while the other reads from it, which takes as long.
    rate = PCIE_SHARE * _PCIE.get(gpu.name, _PCIE_GEN4)
    return Link(name="PCIe", bytes_per_s=rate, hop_s=6e-6)


def _tcp(interconnect: str | float, loopback: Link) -> Link:
    """The link of ranks on CPUs: headers take their share, and a hop costs what gloo itself
    costs."""
    network = _network(interconnect)
    share = TCP_SHARE if isinstance(interconnect, int | float) else 1.0
    slowest = min(share * network.bytes_per_s, loopback.bytes_per_s)
    return replace(network, bytes_per_s=slowest, hop_s=max(network.hop_s, loopback.hop_s))


def _network(interconnect: str | float) -> Link:
    if isinstance(interconnect, int | float):
        rate = float(interconnect) * 1e9
        return Link(name=f"{interconnect:g} GB/s per node", bytes_per_s=rate, hop_s=10e-6)
    if interconnect not in _NETWORKS:
        near = difflib.get_close_matches(interconnect, NETWORK_NAMES, n=2, cutoff=0.4)
        raise UserError(
            f"unknown network {interconnect!r} in cluster.interconnect",
            why="the known networks are " + ", ".join(NETWORK_NAMES),
            fix=f"did you mean {' or '.join(f'cluster.interconnect={name}' for name in near)}?"
            if near
            else "write one of these, or the GB/s of a node's cards: cluster.interconnect=NUMBER",
        )
    rate = NETWORK_SHARE * _NETWORKS[interconnect]
    return Link(name=interconnect, bytes_per_s=rate, hop_s=_HOP_S[interconnect.split("-")[0]])
