"""The same run on other devices: more or fewer of its own kind, or as many of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec, resolve_cluster
from shardwise.facts.gpus import GPUS, NODE, GpuSpec
from shardwise.plan.joint_searches import JointSearches
from shardwise.plan.planned import Forecast, Plan
from shardwise.plan.search import Option
from shardwise.plan.searched import Searched, over_sites
from shardwise.units import format_bytes

# Of the plan's own number of devices: what is looked at to see how the run scales.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What the planner makes of the run on other devices."""

    cluster: ClusterSpec
    option: Option | None
    """The plan that it would choose; None where none fits."""

    why_not: str = ""

    @property
    def forecast(self) -> Forecast | None:
        """Its speed and cost, where they are known."""
        return None if self.option is None else self.option.forecast


def searched_for(searches: JointSearches) -> Searched:
    """Everything that was looked at for this plan."""
    plan = searches.plan
    found = searches.search(plan.config, plan.cluster)
    options = [over_sites(option, plan.config, plan.model) for option in found.options]
    return replace(found, options=options, best=over_sites(found.best, plan.config, plan.model))


def other_sizes(searches: JointSearches) -> list[Elsewhere]:
    """The run on fewer and on more of its devices, its own number among them. Ranks on a CPU share
    it, so more of them say nothing."""
    plan = searches.plan
    return [_look_at(searches, plan.config, cluster) for cluster in sizes_of(plan, _SHARES)]


def other_kinds(searches: JointSearches) -> list[Elsewhere]:
    """The run on as many GPUs of every kind that is like its own, its own first."""
    plan, own = searches.plan, searches.plan.cluster.gpu
    if own is None:
        return []
    found = [_look_at(searches, plan.config, plan.cluster)]
    # What the user says of price, peak and links is about the user's own devices.
    cluster = replace(
        plan.config.cluster,
        usd_per_gpu_hour="auto", peak_tflops="auto", interconnect="auto", nvlink_domain="auto",
        gpu_gib="auto", gpu_gbps="auto",
    )  # fmt: skip
    config = replace(plan.config, cluster=cluster)
    for gpu in _kinds_like(own):
        if (name := _in_full_nodes(plan.world_size, gpu)) is not None:
            named = replace(config, cluster=replace(cluster, name=name))
            place = resolve_cluster(named.cluster, {})
            found.append(_look_at(searches, named, place))
    return found


def sizes_of(plan: Plan, shares: tuple[float, ...]) -> Iterator[ClusterSpec]:
    """Clusters of such shares of the plan's devices: parts of a node, or whole nodes."""
    own = plan.cluster
    for share in shares:
        size, node = own.world_size * share, own.devices_per_node
        is_whole = size == int(size) >= 1 and (size <= node or size % node == 0)
        if share == 1:
            yield own
        elif is_whole and own.gpu is not None:
            yield _resized(plan, int(size), own.gpu)


def _resized(plan: Plan, size: int, gpu: GpuSpec) -> ClusterSpec:
    """So many of the plan's devices, in nodes as large as its own."""
    node, given = plan.cluster.devices_per_node, plan.config.cluster
    shape = f"{size // node}x{node}" if size > node else f"{size}"
    cluster = replace(given, name=f"{shape}x{gpu.name}")
    if given.nvlink_domain != "auto":
        # What fast links join is no more than there is.
        cluster = replace(cluster, nvlink_domain=gcd(given.nvlink_domain, size))
    return resolve_cluster(cluster, {})


def _look_at(searches: JointSearches, config: RunConfig, cluster: ClusterSpec) -> Elsewhere:
    plan = searches.plan
    try:
        searched = searches.search(config, cluster)
    except UserError as error:
        # The batch does not divide, or the mesh that the user gave is another one's.
        if error.code != ExitCode.CONFIG:
            raise
        return Elsewhere(cluster=cluster, option=None, why_not=error.what)
    if searched.fits or cluster == plan.cluster:
        return Elsewhere(cluster=cluster, option=over_sites(searched.best, config, plan.model))
    needed, there = searched.best.memory.total, cluster.memory_bytes
    why = f"does not fit: {format_bytes(needed)} of {format_bytes(there)} at the least"
    return Elsewhere(cluster=cluster, option=None, why_not=why)


def _kinds_like(own: GpuSpec) -> list[GpuSpec]:
    """Other GPUs: beside one that NVLink joins in a node, those that it joins too."""
    joined = own.nvlink_domain >= NODE
    return [
        gpu
        for gpu in GPUS
        if gpu != own
        and (gpu.nvlink_domain >= NODE or not joined)
        # What has no bf16 trains in another format.
        and ("bf16" in gpu.peak_flops or "bf16" not in own.peak_flops)
    ]


def _in_full_nodes(count: int, gpu: GpuSpec) -> str | None:
    """So many GPUs in as few nodes as are sold; None where these would not be alike."""
    nodes = -(-count // min(NODE, gpu.node_gpus))
    if count % nodes:
        return None
    return f"{nodes}x{count // nodes}x{gpu.name}" if nodes > 1 else f"{count}x{gpu.name}"
