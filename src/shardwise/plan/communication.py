"""The communication of a step, and how much of it nothing hides.

In forward a unit's all-gather hides behind the unit before it. In backward its all-gather and the
gradients' reduce-scatter share the link and hide behind compute. Exposed is what takes longer than
the compute beside it, plus what nothing runs beside: the first all-gather, the last reduce-scatter,
the last all-reduce of the replicas and the exchange of a table that two stages share.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.collective_cost import Fabric
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import DTYPE_BYTES, Decisions, computes_float8
from shardwise.plan.rank_share import (
    kept_experts,
    model_share,
    num_expert_blocks,
    num_expert_parts,
    num_expert_shards,
    num_shards,
    stored_params,
)
from shardwise.plan.software import Software
from shardwise.plan.stage_time import table_seconds

_IN_PLACE_PASSES = 1.4  # one is written, beside compute that then waits; 9 ms of 904 were saved


@dataclass(frozen=True, slots=True)
class Collectives:
    """How often every unit is all-gathered and reduced in a step."""

    in_forward: int
    in_backward: int
    reductions: int


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds of one unit's all-gather and of its reduce-scatter."""

    gather: float
    reduce: float
    kept: float = 0.0
    """Seconds of that all-gather which are for what stays gathered for backward, where the rest is
    freed."""


def collectives_of(decided: Decisions, software: Software) -> Collectives:
    """Counts of a whole step."""
    passes = decided.accumulation
    # The stages of a pipeline keep their parameters gathered from the first micro-batch to the
    # last, as a rank does that has them in host memory.
    held = (decided.pipeline > 1 and decided.keeps_gathered) or decided.holds_gathered
    once = decided.accumulates_unsharded or num_shards(decided) == 1
    return Collectives(
        in_forward=1 if held else passes,
        in_backward=0 if decided.keeps_gathered else passes,
        reductions=0 if software.frozen else 1 if once else passes,
    )


def unit_traffic(
    params: float, model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software
) -> UnitTraffic:
    """The traffic of a unit of so many parameters."""
    ring = _Ring(num_shards(decided), decided.tensor)
    return _traffic_over(ring, params / decided.tensor, model, fabric, decided, software)


def block_traffic(
    model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software
) -> UnitTraffic:
    """The traffic of one block. With expert parallelism, ranks gather the experts of their own
    group."""
    if decided.expert == 1:
        return unit_traffic(model.block_params, model, fabric, decided, software)
    dense = unit_traffic(model.block_params - model.expert_params, model, fabric, decided, software)
    ring = _Ring(num_expert_shards(decided), decided.expert)
    share = model.expert_params / num_expert_parts(decided)
    experts = _traffic_over(ring, share, model, fabric, decided, software)
    kept = experts.gather if decided.keeps_experts and not decided.keeps_gathered else 0.0
    return UnitTraffic(dense.gather + experts.gather, dense.reduce + experts.reduce, kept)


@dataclass(frozen=True, slots=True)
class _Ring:
    """So many ranks, at this distance from each other."""

    ranks: int
    stride: int


def _traffic_over(
    ring: _Ring,
    params: float,
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    software: Software,
) -> UnitTraffic:
    share = params * software.link_factor
    gathered = gather_width(model, decided, software) * share
    reduced = 0.0 if software.frozen else DTYPE_BYTES[decided.reduce_dtype] * share
    return UnitTraffic(
        fabric.seconds("all_gather", gathered, ring.ranks, ring.stride),
        fabric.seconds("reduce_scatter", reduced, ring.ranks, ring.stride) if reduced else 0.0,
    )


def copied_bytes(model: ModelSpec, decided: Decisions, software: Software) -> float:
    """Bytes that a step moves in memory for its collectives: what they write, and the copies
    into and out of their buffers."""
    params = model_share(model, decided) / decided.pipeline
    is_whole = num_shards(decided) == 1
    lone = params * software.lone_passes if is_whole and not software.frozen else 0.0
    if is_whole and decided.replicate == 1:
        return lone
    width: float = DTYPE_BYTES[decided.param_dtype]
    reduce = DTYPE_BYTES[decided.reduce_dtype]
    if software.unpack_passes:
        width = software.packed_width
    counts = collectives_of(decided, software)
    gathers = counts.in_forward + counts.in_backward
    passes = _IN_PLACE_PASSES if decided.gather_in_place else 3
    gathered = (
        0.0
        if is_whole
        else gathers * params - counts.in_backward * kept_experts(model, decided) / decided.pipeline
    )
    reduced = params * counts.reductions * (width + 2 * reduce)
    return lone + passes * width * gathered + reduced


def exposed_seconds(
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    forward: float,
    backward: float,
    software: Software,
) -> float:
    """Communication of a whole step that compute does not hide.

    `forward` and `backward` are the seconds of one block.
    """
    table = table_seconds(model, fabric, decided)
    if not software.overlaps:
        return table + _all_in_turn(model, fabric, decided, software)
    layers = model.num_layers / decided.pipeline
    block = block_traffic(model, fabric, decided, software)
    edge = unit_traffic(
        max(model.embedding_params, model.tail_params), model, fabric, decided, software
    )
    counts = collectives_of(decided, software)
    exposed = counts.in_forward * (edge.gather + block.gather) + counts.reductions * edge.reduce
    exposed += counts.in_forward * layers * _beside(block.gather, forward, software)
    again = block.gather - block.kept if counts.in_backward else 0.0
    reducing = counts.reductions * _beside(again + block.reduce, backward, software)
    others = (decided.accumulation - counts.reductions) * _beside(again, backward, software)
    exposed += layers * (reducing + others)
    return exposed + table + _replica_seconds(model, fabric, decided, backward * layers, software)


def tensor_seconds(
    model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software
) -> float:
    """All-gathers and reduce-scatters of one block's activations, in its tensor and its context
    group."""
    if decided.tensor == 1 and decided.context == 1:
        return 0.0
    width = DTYPE_BYTES[decided.param_dtype]
    whole = decided.tokens * model.hidden_size * width
    rounds = 4 + (decided.checkpoint_activations == "full")
    narrow = 0.5 if computes_float8(model, decided) and software.float8_gathers else 1.0
    gather = rounds * fabric.seconds("all_gather", narrow * whole, decided.tensor)
    scatter = rounds * fabric.seconds("reduce_scatter", whole, decided.tensor)
    tensor = (gather + scatter) * software.tensor_factor * (1 - software.tensor_overlap)
    keys = 2 * decided.tokens * decided.context * model.num_kv_heads * model.head_dim * width
    context = 3 * fabric.seconds(
        "all_gather", keys / decided.tensor, decided.context, decided.tensor
    )
    # Half of the keys' exchange hides behind the attention over keys that are there.
    return tensor + context / 2


def expert_seconds(
    model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software
) -> float:
    """All-to-alls of one block: tokens go to their experts and back, in forward and in backward.
    Ranks of a tensor group send their parts of the same tokens."""
    if decided.expert == 1:
        return 0.0
    rounds = 4 + 2 * (decided.checkpoint_activations == "full")
    width = DTYPE_BYTES[decided.param_dtype]
    rows = _rows_sent(model, fabric, decided, software)
    sent = decided.tokens * rows * model.hidden_size * width / decided.tensor
    each = software.expert_factor * fabric.seconds("all_to_all", sent, decided.expert)
    share = num_expert_blocks(model) / model.num_layers
    return rounds * (each + software.exchange_s) * share


def _rows_sent(model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software) -> float:
    """Copies of a token that leave its rank: one for each of its experts, or for each domain that
    has some of them."""
    domains = decided.expert / fabric.domain
    if not software.sends_once or domains <= 1:
        return model.experts_per_token
    return domains * (1 - (1 - 1 / domains) ** model.experts_per_token)


def _all_in_turn(model: ModelSpec, fabric: Fabric, decided: Decisions, software: Software) -> float:
    """Every collective of a step in turn, where nothing overlaps."""
    counts = collectives_of(decided, software)
    shards = num_shards(decided)
    world = decided.replicate * shards
    # All ranks agree on the tokens, the norm and the loss of a step, and replicas on the norm's
    # last bit.
    total = 3 * fabric.seconds("all_reduce", 8, world)
    total += fabric.seconds("all_reduce", 8, decided.replicate, shards)
    units = [
        (model.block_params, model.num_layers, counts.in_backward),
        (model.embedding_params, 1, counts.in_backward),
        # Backward first needs what forward uses last, so that stays gathered.
        (model.tail_params, 1, 0),
    ]
    for params, times, again in units:
        unit = unit_traffic(params, model, fabric, decided, software)
        gathers = counts.in_forward + again
        reduced = DTYPE_BYTES[decided.reduce_dtype] * params / shards
        replicas = fabric.seconds("all_reduce", reduced, decided.replicate, shards)
        total += times * (gathers * unit.gather + counts.reductions * unit.reduce + replicas)
    return total


def _beside(traffic: float, compute: float, software: Software) -> float:
    """The time that traffic adds to the compute beside it."""
    hidden = min(traffic, compute)
    return traffic - hidden + software.contention * hidden


def gather_width(model: ModelSpec, decided: Decisions, software: Software) -> float:
    """Bytes of a parameter while it is gathered."""
    if software.unpack_passes:
        return software.packed_width
    narrow = computes_float8(model, decided) and decided.float8_gather and software.float8_gathers
    return 1 if narrow else DTYPE_BYTES[decided.param_dtype]


def _replica_seconds(
    model: ModelSpec, fabric: Fabric, decided: Decisions, backward: float, software: Software
) -> float:
    """The all-reduce over replicas: beside the last backward, and what is left after it."""
    if decided.replicate == 1 or software.frozen:
        return 0.0
    ranks = num_shards(decided)
    shard_params = stored_params(model, decided) / decided.pipeline
    units = max(software.replica_pieces, model.num_layers / decided.pipeline + 2)
    unit_bytes = DTYPE_BYTES[decided.reduce_dtype] * shard_params / units * software.link_factor
    inside = 1 if software.stages_outermost else decided.pipeline
    stride = ranks * decided.tensor * inside
    unit = fabric.seconds("all_reduce", unit_bytes, decided.replicate, stride)
    return unit + _beside((units - 1) * unit, backward, software)
