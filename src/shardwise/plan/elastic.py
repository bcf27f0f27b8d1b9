"""The same run on fewer nodes: the same global batches in the same order, in other shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import LOCAL, parse_cluster


def with_nodes(config: RunConfig, num_nodes: int) -> RunConfig:
    """The configuration for `num_nodes` of its cluster's nodes.

    The global batch stays. How it is split over ranks and passes, and how many copies of the model
    there are, is planned anew.
    """
    train, cluster = config.train, parse_cluster(config.cluster.name, config.cluster)
    if train.global_batch == "auto":
        raise UserError(
            "launch.elastic needs train.global_batch",
            why="with `auto` fewer nodes would train on smaller batches, which is another run",
            fix=f"write train.global_batch={cluster.world_size}, or another multiple of the "
            f"{cluster.world_size} ranks",
        )
    kind = "CPU" if cluster.gpu is None else cluster.gpu.name
    name = f"{num_nodes}x{cluster.devices_per_node}x{kind}"
    return replace(
        config,
        cluster=replace(config.cluster, name=name),
        mesh=replace(config.mesh, replicate="auto"),
        train=replace(train, accumulation="auto"),
    )


def as_launched(config: RunConfig, environ: Mapping[str, str] | None = None) -> RunConfig:
    """The configuration for the nodes that the launcher has, where it may have fewer than asked."""
    environ = os.environ if environ is None else environ
    is_open = config.cluster.name.strip().lower() == LOCAL
    if not config.launch.elastic or is_open or "RANK" not in environ:
        return config
    cluster = parse_cluster(config.cluster.name, config.cluster)
    world, per_node = int(environ["WORLD_SIZE"]), cluster.devices_per_node
    num_nodes = world // per_node
    is_fewer = world % per_node == 0 and 0 < num_nodes < cluster.num_nodes
    return with_nodes(config, num_nodes) if is_fewer else config
