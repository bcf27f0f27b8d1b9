"""The devices of a run: how many of which kind, by name or by probing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from shardwise.config.schema import Auto, ClusterConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.collective_cost import Fabric, Link, fabric_of
from shardwise.facts.gpus import NODE, GpuSpec
from shardwise.facts.probe import ProbedGpu, probe_cpu, probe_gpus
from shardwise.facts.stated_gpu import gpu_named, validate_not_described

LOCAL = "local"
_NAME = re.compile(r"\s*(\d+)\s*x\s*(?:(\d+)\s*x\s*)?(\S.*?)\s*", re.IGNORECASE)
_LINKS = ("measured_inside", "measured_between")
_FORM = (
    "write cluster.name=NODESxGPUSxKIND, such as cluster.name=8xH100, cluster.name=4x8xH100, "
    "cluster.name=2xCPU"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The devices of a run, all of one kind."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: Literal["cuda", "cpu"]
    gpu: GpuSpec | None
    """None for CPUs, and for GPUs that the catalogue does not know: they get no MFU."""

    device_name: str
    memory_bytes: int
    """The memory of one device. Ranks on one CPU share its memory evenly."""

    compute_formats: frozenset[str]
    """Which of fp32, fp16, bf16 and fp8 the device has arithmetic for."""

    nvlink_domain: int
    """Devices that the fast links join: a node, or the rack of an NVL72 system."""

    interconnect: str | float = "auto"
    peak_tflops: float | Auto = "auto"
    """The network and the peak as the user gave them."""

    datacenters: int = 1
    measured_inside: Link | None = None
    """What a calibration found between devices of one domain."""

    measured_between: Link | None = None
    """The same between domains."""

    source: Literal["named", "probed"]

    @property
    def world_size(self) -> int:
        """The number of ranks: one for each device."""
        return self.num_nodes * self.devices_per_node

    @property
    def device_in_words(self) -> str:
        """The device's name in a sentence. Few CPUs have a name that says that they are CPUs."""
        return f"this CPU ({self.device_name})" if self.device == "cpu" else self.device_name

    @property
    def usual_format(self) -> str:
        """The format that a run computes in unless it is told otherwise.

        Some CPUs have bf16 and most have not, so all of them compute fp32: a run has the same
        losses on each.
        """
        if self.device == "cpu":
            return "fp32"
        return next(name for name in ("bf16", "fp16", "fp32") if name in self.compute_formats)

    @property
    def fabric(self) -> Fabric:
        """The links of its collectives."""
        return fabric_of(
            self.gpu,
            self.nvlink_domain,
            self.interconnect,
            self.measured_inside,
            self.measured_between,
        )

    def peak_flops(self, fmt: str) -> float | None:
        """Dense FLOP/s of one device in a format; None where it is not known."""
        if self.peak_tflops != "auto":
            return 1e12 * self.peak_tflops
        return None if self.gpu is None else self.gpu.peak_flops.get(fmt)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["gpu"] = self.gpu.to_dict() if self.gpu else None
        data["compute_formats"] = sorted(self.compute_formats)
        for name in _LINKS:
            data[name] = asdict(data[name]) if data[name] else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClusterSpec:
        """Back from `to_dict`."""
        gpu = GpuSpec.from_dict(data["gpu"]) if data["gpu"] else None
        formats = frozenset(data["compute_formats"])
        links = {name: Link(**data[name]) for name in _LINKS if data.get(name)}
        return cls(**{**data, "gpu": gpu, "compute_formats": formats, **links})


def resolve_cluster(config: ClusterConfig, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """The cluster that the configuration means, in this environment."""
    environ = os.environ if environ is None else environ
    if config.name.strip().lower() == LOCAL:
        validate_not_described(config)
        cluster = _as_launched(probe_cluster(environ), environ)
    else:
        cluster = parse_cluster(config.name, config)
        if config.nvlink_domain == "auto":
            _validate_node(cluster)
    cluster = replace(
        cluster,
        datacenters=config.datacenters,
        interconnect=config.interconnect,
        peak_tflops=config.peak_tflops,
    )
    return _with_domain(cluster, config.nvlink_domain)


def parse_cluster(name: str, config: ClusterConfig | None = None) -> ClusterSpec:
    """`4x8xH100` is four nodes with eight H100 each; `2xCPU` is two ranks on this CPU.

    `config` may describe a GPU that the catalogue does not know.
    """
    config = config or ClusterConfig(name=name)
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"cannot read the cluster {name!r}", fix=f"{_FORM} or cluster.name={LOCAL}")
    first, second, kind = match.groups()
    num_nodes, devices_per_node = (int(first), int(second)) if second else (1, int(first))
    if num_nodes == 0 or devices_per_node == 0:
        raise UserError(f"the cluster {name!r} has no devices", fix=_FORM)
    if kind.lower() == "cpu":
        validate_not_described(config)
        return _cpu_cluster(name, num_nodes, devices_per_node, "named")
    gpu = gpu_named(kind, name[: match.start(3)].replace(" ", ""), config)
    return ClusterSpec(
        name=name,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device="cuda",
        gpu=gpu,
        device_name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        compute_formats=gpu.compute_formats,
        nvlink_domain=_own_domain(num_nodes, devices_per_node, gpu),
        source="named",
    )


def probe_cluster(environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """The GPUs of this machine, or its CPU as one rank."""
    environ = os.environ if environ is None else environ
    gpus = probe_gpus(environ)
    if not gpus:
        return _cpu_cluster(LOCAL, 1, 1, "probed")
    first = _the_only_kind(gpus, environ)
    return ClusterSpec(
        name=LOCAL,
        num_nodes=1,
        devices_per_node=len(gpus),
        device="cuda",
        gpu=first.gpu,
        device_name=first.device_name,
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        compute_formats=first.compute_formats,
        nvlink_domain=len(gpus),
        source="probed",
    )


def _validate_node(cluster: ClusterSpec) -> None:
    """Raise where a name gives one node more GPUs than any server or NVLink rack holds.

    Its collectives would be planned at NVLink's speed. A user with such a node says so with
    `cluster.nvlink_domain`. A machine that was probed is taken as it is.
    """
    gpu, count = cluster.gpu, cluster.devices_per_node
    if gpu is None or count <= gpu.most_in_a_node:
        return
    raise UserError(
        f"{cluster.name} puts {count} GPUs into one node; a node of {gpu.name} has at most "
        f"{gpu.most_in_a_node}",
        why="GPUs of one node would be planned as if fast links joined all of them",
        fix=f"write cluster.name={in_usual_nodes(cluster, gpu)}, or cluster.nvlink_domain={count} "
        "where fast links do join so many",
    )


def in_usual_nodes(cluster: ClusterSpec, gpu: GpuSpec) -> str:
    """The same GPUs in nodes of equal size, or in full nodes where they do not divide."""
    total, full = cluster.world_size, min(NODE, gpu.node_gpus)
    nodes = -(-total // full)
    return f"{nodes}x{total // nodes if total % nodes == 0 else full}x{gpu.name}"


def _cpu_cluster(
    name: str, num_nodes: int, devices_per_node: int, source: Literal["named", "probed"]
) -> ClusterSpec:
    """Ranks on this machine's CPU. `2x2xCPU` emulates two nodes."""
    cpu = probe_cpu()
    return ClusterSpec(
        name=name,
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device="cpu",
        gpu=None,
        device_name=cpu.device_name,
        memory_bytes=cpu.memory_bytes // (num_nodes * devices_per_node),
        compute_formats=cpu.compute_formats,
        nvlink_domain=devices_per_node,
        source=source,
    )


def _the_only_kind(gpus: list[ProbedGpu], environ: Mapping[str, str]) -> ProbedGpu:
    """The one kind of device. Every rank does the same work, so one plan cannot suit two kinds."""
    kinds = sorted({gpu.device_name for gpu in gpus})
    if len(kinds) > 1:
        seen = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
        alike = [
            ",".join(seen[i].strip() for i, gpu in enumerate(gpus) if gpu.device_name == kind)
            for kind in kinds
        ]
        raise UserError(
            f"different kinds of GPUs are visible here: {', '.join(kinds)}",
            why="all ranks hold equal shards and wait for the slowest",
            fix=f"make one kind visible: export CUDA_VISIBLE_DEVICES={alike[0]} (or {alike[1]})",
            code=ExitCode.ENVIRONMENT,
        )
    return gpus[0]


def _as_launched(cluster: ClusterSpec, environ: Mapping[str, str]) -> ClusterSpec:
    """The cluster with the launcher's counts: inside torchrun they include other nodes, and a
    probe does not."""
    if "WORLD_SIZE" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        return cluster
    world, local = environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]
    # Python converts no number of thousands of digits.
    are_counts = all(text.isdecimal() and len(text) < 10 and int(text) for text in (world, local))
    if not are_counts or int(world) % int(local):
        raise UserError(
            f"WORLD_SIZE={world} and LOCAL_WORLD_SIZE={local} do not fit together",
            why="every node must run the same number of ranks",
            fix="start the run with torchrun, or outside of it: unset WORLD_SIZE LOCAL_WORLD_SIZE",
            code=ExitCode.ENVIRONMENT,
        )
    num_nodes, ranks = int(world) // int(local), int(local)
    memory = cluster.memory_bytes // ranks if cluster.device == "cpu" else cluster.memory_bytes
    return replace(
        cluster,
        num_nodes=num_nodes,
        devices_per_node=ranks,
        memory_bytes=memory,
        nvlink_domain=_own_domain(num_nodes, ranks, cluster.gpu),
    )


def _own_domain(num_nodes: int, devices_per_node: int, gpu: GpuSpec | None) -> int:
    """The fast domain: a node, or several nodes where the chips' links leave it."""
    if gpu is None or gpu.nvlink_domain <= NODE:
        return devices_per_node
    reach = gpu.nvlink_domain // devices_per_node
    joined = max((n for n in range(1, reach + 1) if num_nodes % n == 0), default=1)
    return devices_per_node * joined


def _with_domain(cluster: ClusterSpec, domain: int | Auto) -> ClusterSpec:
    if domain == "auto":
        return cluster
    if domain < 1 or cluster.world_size % domain:
        raise UserError(
            f"cluster.nvlink_domain={domain} does not divide {cluster.world_size} devices",
            why="NVLink domains hold the same number of devices each",
            fix=f"write cluster.nvlink_domain={cluster.devices_per_node}, or another divisor of "
            f"{cluster.world_size}",
        )
    return replace(cluster, nvlink_domain=domain)
