"""Read NCCL's own log (NCCL_DEBUG=INFO): which transports it chose, and whether they are good."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.facts.cluster import ClusterSpec
from shardwise.verify.gates import Gate

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"NCCL INFO .*Using network (.+?)\s*$")
_CHANNEL = re.compile(r"NCCL INFO Channel .* via (P2P|SHM|NET)/(.*)$")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_SOCKET = "Socket"
# GPUs whose networks can be used without the host.
_DIRECT = ("infiniband", "roce", "efa", "gpudirect")
# GPUs whose NVLink switches can reduce.
_WITH_NVLS = ("H100", "H200", "H800", "H20", "B200", "GB200", "B300", "GB300")
_LEAST_FOR_NVLS = 4


@dataclass(frozen=True, slots=True)
class Transports:
    """How often each transport was chosen. `+` merges the logs of several ranks."""

    version: str = ""
    networks: tuple[str, ...] = ()
    """The network's name, such as IB, Socket or AWS Libfabric."""

    peer: int = 0
    """Channels from GPU to GPU of a node, directly."""

    shared: int = 0
    """Channels through the host's memory."""

    sockets: int = 0
    """Channels between nodes over TCP."""

    direct: int = 0
    """Channels between nodes on which the card reads the GPU's memory (GDRDMA)."""

    staged: int = 0
    """Channels between nodes on which the host copies for the card."""

    nvls: int = 0
    """Devices that report NVLS: NVLink switches that reduce for them."""

    no_nvls: int = 0

    @property
    def across(self) -> int:
        """All channels between nodes."""
        return self.sockets + self.direct + self.staged

    @property
    def channels(self) -> int:
        """All channels. A log without any is not NCCL's, or not of NCCL_DEBUG=INFO."""
        return self.peer + self.shared + self.across

    def __add__(self, other: Transports) -> Transports:
        counts = ("peer", "shared", "sockets", "direct", "staged", "nvls", "no_nvls")
        return Transports(
            version=self.version or other.version,
            networks=tuple(sorted({*self.networks, *other.networks})),
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transports:
        """Back from `to_dict`."""
        return cls(**{**data, "networks": tuple(data["networks"])})


def read_log(text: str) -> Transports:
    """What the log lines of one or several ranks say."""
    found = Transports()
    for line in text.splitlines():
        found += _read_line(line)
    return found


def _read_line(line: str) -> Transports:
    if match := _CHANNEL.search(line):
        return _read_channel(match[1], match[2])
    if match := _NETWORK.search(line):
        return Transports(networks=(match[1],))
    if match := _NVLS.search(line):
        return Transports(no_nvls=1) if match[1] else Transports(nvls=1)
    if match := _VERSION.search(line):
        return Transports(version=match[1])
    return Transports()


def _read_channel(way: str, rest: str) -> Transports:
    """`NET/IB/0/GDRDMA`, `NET/Socket/0`, `P2P/CUMEM/read`, `SHM/direct/direct`."""
    if way == "P2P":
        return Transports(peer=1)
    if way == "SHM":
        return Transports(shared=1)
    if rest.startswith(_SOCKET):
        return Transports(sockets=1)
    return Transports(direct=1) if "GDRDMA" in rest else Transports(staged=1)


def check_transports(found: Transports, cluster: ClusterSpec) -> list[Gate]:
    """Gates on NCCL's choices. Gates that this cluster cannot have are left out."""
    gates = []
    if found.across:
        gates.append(_network_gate(found, cluster))
    if found.direct or found.staged:
        gates.append(_direct_gate(found))
    if found.peer or found.shared:
        gates.append(_peer_gate(found, cluster))
    if found.nvls or found.no_nvls:
        gates.append(_nvls_gate(found, cluster))
    return gates


def _network_gate(found: Transports, cluster: ClusterSpec) -> Gate:
    names, expected = ", ".join(found.networks) or "not named", cluster.fabric.between.name
    if not found.sockets:
        return Gate("nccl network", names, expected, "pass")
    figure = f"{found.sockets} of {found.across} channels over TCP sockets"
    if not expected.startswith(_DIRECT):
        return Gate("nccl network", figure, expected, "pass")
    advice = (
        "NCCL found no such card: check ibv_devinfo inside the job, NCCL_IB_HCA, that "
        "NCCL_IB_DISABLE is unset, the devices and the memlock limit of the container; on EFA the "
        "aws-ofi-nccl plugin"
    )
    return Gate("nccl network", figure, expected, "fail", advice)


def _direct_gate(found: Transports) -> Gate:
    total = found.direct + found.staged
    figure = f"{found.direct} of {total} channels [GDRDMA]"
    if not found.staged:
        return Gate("nccl gpudirect", figure, "all", "pass")
    advice = (
        "the host copies for the card: load nvidia_peermem (or a driver with dmabuf), turn PCIe "
        "ACS off, NCCL_NET_GDR_LEVEL=SYS to allow far cards"
    )
    return Gate("nccl gpudirect", figure, "all", "warn", advice)


def _peer_gate(found: Transports, cluster: ClusterSpec) -> Gate:
    figure = f"{found.peer} of {found.peer + found.shared} channels directly"
    has_nvlink = cluster.gpu is not None and cluster.gpu.nvlink_domain > 1
    if not found.shared or not has_nvlink:
        return Gate("nccl peer access", figure, "all" if has_nvlink else "any", "pass")
    advice = (
        "NVLink is not used: check that NCCL_P2P_DISABLE is unset, that every rank sees all GPUs "
        "of the node, that the fabric manager runs, and nvidia-smi topo -m"
    )
    return Gate("nccl peer access", figure, "all", "fail", advice)


def _nvls_gate(found: Transports, cluster: ClusterSpec) -> Gate:
    figure = f"{found.nvls} of {found.nvls + found.no_nvls} devices"
    name = cluster.gpu.name if cluster.gpu else cluster.device_name
    if name not in _WITH_NVLS or cluster.nvlink_domain < _LEAST_FOR_NVLS:
        return Gate("nccl nvls", figure, "any", "skip", f"{cluster.name} has no such switches")
    if not found.no_nvls:
        return Gate("nccl nvls", figure, "all", "pass")
    advice = (
        "without NVLS all-reduce inside a node is about a quarter slower: the fabric manager must "
        "run, and NCCL_NVLS_ENABLE must not be 0"
    )
    return Gate("nccl nvls", figure, "all", "warn", advice)


@contextmanager
def captured_log(device: str) -> Iterator[Path | None]:
    """Let NCCL write its log to a file while the block runs, unless the user has named one."""
    if device != "cuda" or "NCCL_DEBUG" in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        path = Path(folder) / "nccl.log"
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH",
            "NCCL_DEBUG_FILE": str(path),
        }
        yield path
