"""Everything about this node that checks look at, read once."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.doctor.machine.disk import write_rate
from shardwise.doctor.machine.gpu import GpuState, read_gpus
from shardwise.doctor.machine.network import (
    RdmaPort,
    is_port_taken,
    own_address,
    read_interfaces,
    read_rdma_ports,
)
from shardwise.doctor.machine.pci import redirecting_bridges
from shardwise.facts.host import memory_left
from shardwise.plan.planned import Plan

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_VARIABLES = ("NCCL_", "GLOO_", "CUDA_", "MASTER_", "OMP_", "PYTORCH_", "TORCH_")
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)[^\n]*")
_DMESG_TIMEOUT_S = 10
# torchrun's own.
USUAL_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as it is now. Limits that are not set are None."""

    host: str
    cores: int
    open_files: int | None
    locked_bytes: int | None
    shm_bytes: int | None
    memory_left: int | None
    gpus: tuple[GpuState, ...]
    xids: tuple[str, ...]
    """Lines of the kernel's log in which the driver reports an error of a GPU."""

    nccl: str | None
    """The version of the NCCL package beside torch; None where torch has its own."""

    interfaces: Mapping[str, str]
    rdma_ports: tuple[RdmaPort, ...]
    modules: frozenset[str]
    """Those of `nvidia_peermem` and `gdrdrv` that are loaded."""

    bridges: tuple[str, ...] | None
    """PCIe bridges with ACS on; None where that cannot be read."""

    address: str | None
    environ: Mapping[str, str]
    taken_port: int | None
    """The rendezvous port, where something listens on it already."""

    write_bytes_per_s: float | None
    """To the run directory; None where there is none to look at."""

    plan: Plan | None
    """The plan that is to run here."""

    def to_dict(self) -> dict[str, Any]:
        """What another node can be compared with."""
        return {
            "host": self.host,
            "gpus": [dict(gpu.fields) for gpu in self.gpus],
            "nccl": self.nccl,
            "rdma": [asdict(port) for port in self.rdma_ports],
            "environ": dict(self.environ),
        }


def read_node(
    plan: Plan | None, environ: Mapping[str, str], root: Path = Path("/"), *, writes: bool = True
) -> Node:
    """Look at this machine. `root` is where its files are; with `writes` the disk is tried."""
    modules = ("nvidia_peermem", "gdrdrv")
    gpus = read_gpus(environ)
    return Node(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shm_bytes=_size(root / "dev/shm"),
        memory_left=memory_left(root),
        gpus=gpus,
        xids=_xids(environ) if gpus else (),
        nccl=_nccl_version(),
        interfaces=read_interfaces(root),
        rdma_ports=read_rdma_ports(root),
        modules=frozenset(name for name in modules if (root / "sys/module" / name).exists()),
        bridges=redirecting_bridges(root) if gpus else None,
        address=own_address(),
        environ={name: value for name, value in environ.items() if name.startswith(_VARIABLES)},
        taken_port=_taken_port(plan, environ),
        write_bytes_per_s=write_rate(plan.run_dir) if plan is not None and writes else None,
        plan=plan,
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(place: Path) -> int | None:
    try:
        state = os.statvfs(place)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize


def _nccl_version() -> str | None:
    for package in _NCCL_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _xids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The kernel's log needs privileges on most systems. Without them nothing is known."""
    command = shutil.which("dmesg", path=environ.get("PATH"))
    if command is None:
        return ()
    try:
        told = subprocess.run(
            [command], capture_output=True, text=True, errors="replace", timeout=_DMESG_TIMEOUT_S
        ).stdout
    except subprocess.TimeoutExpired:
        return ()
    return tuple(match[0] for match in _XID.finditer(told))


def _taken_port(plan: Plan | None, environ: Mapping[str, str]) -> int | None:
    """Ranks of one node choose a free port. A rank of a running job has the port itself."""
    if plan is None or plan.cluster.num_nodes == 1 or "RANK" in environ:
        return None
    text = environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 2**16 else USUAL_PORT
    return port if is_port_taken(port) else None
