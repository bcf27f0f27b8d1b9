"""Changes of the configuration that make a model fit. Each was planned and fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from shardwise.config.schema import RunConfig, TrainConfig
from shardwise.config.schema_text import value_at
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec, resolve_cluster
from shardwise.facts.gpus import NODE
from shardwise.plan.batch import whole_batch

Change = dict[str, Any]
Fits = Callable[[RunConfig, ClusterSpec], bool]

# Settings that the user may have fixed at a value that takes more memory than the planner's.
_BETTER_LEFT_OPEN = (
    ("shard.strategy", "mesh.replicate", "mesh.shard", "shard.reshard_after_forward"),
    ("mesh.tensor", "mesh.context", "mesh.expert"),
    ("memory.checkpoint_activations", "mesh.pipeline_recompute"),
    ("memory.loss",),
    ("memory.accumulate",),
    ("train.micro_batch", "train.accumulation"),
)
# Numbers of nodes that are tried for a larger cluster, in order.
_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SHORTEST = 128  # tokens; shorter sequences train nothing of use


def advise(config: RunConfig, cluster: ClusterSpec, fits: Fits) -> str:
    """Settings to write: of each kind the smallest change that `fits`, else what to look for."""
    kinds = (_left_open, _shorter_sequences, _offload, _fewer_ranks, _more_devices)
    found = [_smallest_of(list(kind(config, cluster)), config, cluster, fits) for kind in kinds]
    words = [" ".join(f"{path}={value}" for path, value in each.items()) for each in found if each]
    if words:
        return "write " + ", or ".join(words)
    return (
        "shorter sequences, offload or more of these devices are not enough by themselves: choose "
        "a smaller model.name, or a cluster.name of devices with more memory"
    )


def _smallest_of(
    changes: list[Change], config: RunConfig, cluster: ClusterSpec, fits: Fits
) -> Change | None:
    """The first change that fits. The last one goes furthest: where that is not enough, none is."""

    def is_enough(change: Change) -> bool | None:
        try:
            changed = change_config(config, change)
            # A cluster that was probed stays as it is, unless the change names another one.
            place = resolve_cluster(changed.cluster, {}) if "cluster.name" in change else cluster
            return fits(changed, place)
        except UserError:
            return None  # it contradicts something else that the user gave

    if not changes or is_enough(changes[-1]) is False:
        return None
    return next(filter(is_enough, changes), None)


def change_config(config: RunConfig, change: Mapping[str, Any]) -> RunConfig:
    """The same configuration with other values at some paths such as `data.seq_len`."""
    for path, value in change.items():
        section, _, name = path.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _left_open(config: RunConfig, cluster: ClusterSpec) -> Iterator[Change]:
    """The user's decisions, given back to the planner: one at a time, then all of them."""
    given = [
        {path: "auto" for path in paths if value_at(config, path) != "auto"}
        for paths in _BETTER_LEFT_OPEN
    ]
    yield from filter(None, given)
    yield reduce(dict.__or__, given)


def _shorter_sequences(config: RunConfig, cluster: ClusterSpec) -> Iterator[Change]:
    length = 2 ** (config.data.seq_len - 1).bit_length() // 2
    while length >= _SHORTEST:
        yield {"data.seq_len": length}
        length //= 2


def _offload(config: RunConfig, cluster: ClusterSpec) -> Iterator[Change]:
    """Offload to host memory. A CPU rank computes there already."""
    if cluster.device == "cuda" and config.memory.offload == "none":
        yield {"memory.offload": "cpu"}


def _fewer_ranks(config: RunConfig, cluster: ClusterSpec) -> Iterator[Change]:
    """Fewer CPU ranks: they share the memory of one machine, so each has more."""
    if cluster.device == "cpu":
        for ranks in range(cluster.world_size - 1, 0, -1):
            yield {"cluster.name": f"{ranks}xCPU", **_batch_over(config.train, ranks)}


def _more_devices(config: RunConfig, cluster: ClusterSpec) -> Iterator[Change]:
    """More devices: parts of a node first, then nodes, with a batch that divides over all ranks."""
    if cluster.gpu is None:
        return
    node = max(cluster.devices_per_node, min(NODE, cluster.gpu.node_gpus))
    shapes = [(1, devices) for devices in (2, 4, 8) if devices < node]
    for nodes, devices in (*shapes, *((nodes, node) for nodes in _NODES)):
        if nodes * devices > cluster.world_size:
            name = f"{nodes}x{devices}" if nodes > 1 else f"{devices}"
            batch = _batch_over(config.train, nodes * devices)
            yield {"cluster.name": f"{name}x{cluster.gpu.name}", **batch}


def _batch_over(train: TrainConfig, ranks: int) -> Change:
    """The next larger batch that is whole micro-batches on every rank, where the given one is
    not."""
    whole = whole_batch(train, ranks)
    return {} if whole == train.global_batch else {"train.global_batch": whole}
