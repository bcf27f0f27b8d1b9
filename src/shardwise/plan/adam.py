"""The bytes of an optimizer's state, which are Adam's two moments for most runs, and where they
are."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.facts.paging import NUM_PAGES, PAGE_NUMBERS
from shardwise.plan.decisions import Choice, Decisions
from shardwise.plan.rank_share import num_expert_blocks
from shardwise.units import format_bytes

# Of both moments of a parameter, in fp32.
ADAM_BYTES = 8
# Of the one of Muon and Lion, and of each of Adafactor's factors.
MOMENTUM_BYTES = 4


def adam_bytes(decided: Decisions) -> float:
    """Bytes of both moments of a parameter. With int8 a block of 256 has a scale of each."""
    by_state = {"bf16": ADAM_BYTES / 2, "int8": ADAM_BYTES / 4 + 2 * 4 / 256}
    return by_state.get(decided.optimizer_state, ADAM_BYTES)


def state_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes of the optimizer's state for each trained parameter, by the mean."""
    if decided.optimizer == "muon":
        share = matrix_params(model) / model.trained_params
        return MOMENTUM_BYTES * share + ADAM_BYTES * (1 - share)
    if decided.optimizer == "lion":
        return MOMENTUM_BYTES
    if decided.optimizer == "adafactor":
        # A number for each row and one for each column of matrices about this wide.
        return 2 * MOMENTUM_BYTES / model.hidden_size
    return adam_bytes(decided)


def matrix_params(model: ModelSpec) -> int:
    """Trained parameters that Muon updates: the matrices of blocks that are no stacks of
    experts."""
    if model.adapter is not None:
        return model.trained_params
    dense = model.total_params - model.embedding_params - model.tail_params
    return max(0, dense - model.expert_params * num_expert_blocks(model))


def state_on_device(model: ModelSpec, shard_params: int, decided: Decisions) -> int:
    """Bytes of a rank's state on its device: of two pages, where the rest is in host memory."""
    if decided.offload:
        return 0
    if decided.optimizer == "adafactor":  # every rank has all of it
        return int(model.trained_params * state_bytes(model, decided))
    if decided.optimizer != "adamw":
        return int(shard_params * state_bytes(model, decided))
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
