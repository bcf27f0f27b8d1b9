"""The bytes of Adam's two moments, and where they are."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.facts.paging import NUM_PAGES, PAGE_NUMBERS
from shardwise.plan.decisions import Choice, Decisions
from shardwise.units import format_bytes

# Of both moments of a parameter, in fp32.
ADAM_BYTES = 8


def adam_bytes(decided: Decisions) -> float:
    """Bytes of both moments of a parameter. With int8 a block of 256 has a scale of each."""
    by_state = {"bf16": ADAM_BYTES / 2, "int8": ADAM_BYTES / 4 + 2 * 4 / 256}
    return by_state.get(decided.optimizer_state, ADAM_BYTES)


def adam_on_device(shard_params: int, decided: Decisions) -> int:
    """Bytes of a rank's moments on its device: of two pages, where the rest is in host memory."""
    if decided.offload:
        return 0
    most = NUM_PAGES * PAGE_NUMBERS if decided.offload_optimizer else shard_params
    return int(min(shard_params, most) * adam_bytes(decided))


def choose_offload_optimizer(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec
) -> Choice[bool]:
    """Whether moments are in host memory, and how much of it they take."""
    if not config.memory.offload_optimizer:
        return Choice(False, "not asked for: each update would wait for PCIe", "rule")
    share = min(1.0, cluster.devices_per_node / cluster.world_size)
    needed = format_bytes(ADAM_BYTES * model.trained_params * share)
    return Choice(True, f"given; host memory needed on a node: at least {needed}", "user")
