"""What to optimise: the fastest run on all devices, the cheapest tokens, or the fewest devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.plan.planned import Plan

Goal = Literal["fastest", "cheapest", "fewest"]


def choose_for(goal: Goal, cluster: ClusterSpec, plan_on: Callable[[ClusterSpec], Plan]) -> Plan:
    """The plan that meets the goal, on the cluster or a part of it."""
    if goal == "fastest":
        return plan_on(cluster)
    plans = _plans_that_fit(cluster, plan_on)
    if goal == "fewest":
        found = next(plans, None)
    else:
        # All devices cost the same, so the cheapest token is the one that takes the least device
        # time.
        found = max(plans, key=_tokens_per_device, default=None)
    return plan_on(cluster) if found is None else found


def parts_of(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Smaller clusters of the same devices, smallest first, with the cluster itself last: parts
    of a node, then nodes."""
    whole = cluster.devices_per_node
    for devices in (size for size in range(1, whole) if whole % size == 0):
        yield _part(cluster, 1, devices)
    for nodes in range(1, cluster.num_nodes + 1):
        yield _part(cluster, nodes, whole)


def _part(cluster: ClusterSpec, nodes: int, devices: int) -> ClusterSpec:
    kind = "CPU" if cluster.gpu is None else cluster.gpu.name
    name = f"{nodes}x{devices}x{kind}" if nodes > 1 else f"{devices}x{kind}"
    domain = min(cluster.nvlink_domain, nodes * devices)
    return replace(
        cluster, name=name, num_nodes=nodes, devices_per_node=devices, nvlink_domain=domain
    )


def _plans_that_fit(cluster: ClusterSpec, plan_on: Callable[[ClusterSpec], Plan]) -> Iterator[Plan]:
    for part in parts_of(cluster):
        try:
            plan = plan_on(part)
        except UserError as error:
            # A part may be too small, or not divide the batch. The error comes from the whole
            # cluster.
            if error.code not in (ExitCode.DOES_NOT_FIT, ExitCode.CONFIG):
                raise
            continue
        if not plan.warnings:
            yield plan


def _tokens_per_device(plan: Plan) -> float:
    return 0.0 if plan.forecast is None else plan.forecast.tokens_per_s
