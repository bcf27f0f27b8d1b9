"""What moves between ranks in a step, and how much of it nothing hides.

In forward a unit's all-gather hides behind the unit before it; in backward its all-gather and the
gradients' reduce-scatter share the link and hide behind compute. Exposed is what is longer than the
compute it runs beside, plus what nothing runs beside: the first gather, the last reduce-scatter and
the last all-reduce of the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.facts.fabric import Fabric
from shardwise.facts.models import ModelSpec
from shardwise.plan.layout import DTYPE_BYTES, Layout, gathered_params
from shardwise.plan.software import Software

_PACKED_WIDTH = 0.5  # four bits
_IN_PLACE_PASSES = 1.4  # one is written, beside compute that then waits; 9 ms of 904 were saved


@dataclass(frozen=True, slots=True)
class Collectives:
    """How often every unit is gathered and reduced in a step."""

    in_forward: int
    in_backward: int
    reductions: int


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds of one unit's all-gather and of its reduce-scatter."""

    gather: float
    reduce: float


def collectives_of(layout: Layout, software: Software) -> Collectives:
    """Counts of a whole step."""
    passes = layout.accumulation
    # The stages of a pipeline hold their parameters from the first micro-batch to the last.
    held = layout.pipeline > 1 and layout.keeps_gathered
    once = layout.accumulates_unsharded or layout.shard * layout.context == 1
    return Collectives(
        in_forward=1 if held else passes,
        in_backward=0 if layout.keeps_gathered else passes,
        reductions=0 if software.frozen else 1 if once else passes,
    )


def unit_traffic(params: float, fabric: Fabric, layout: Layout, software: Software) -> UnitTraffic:
    """Of a unit of so many parameters."""
    share = params / layout.tensor * software.link_factor
    ranks, stride = layout.shard * layout.context, layout.tensor
    reduce = DTYPE_BYTES[layout.reduce_dtype] * share
    return UnitTraffic(
        fabric.seconds("all_gather", _gather_width(layout, software) * share, ranks, stride),
        0.0 if software.frozen else fabric.seconds("reduce_scatter", reduce, ranks, stride),
    )


def block_traffic(
    model: ModelSpec, fabric: Fabric, layout: Layout, software: Software
) -> UnitTraffic:
    """Of one block. Experts that are dealt out are gathered by the ranks of their own group."""
    if layout.expert == 1:
        return unit_traffic(model.block_params, fabric, layout, software)
    dense = unit_traffic(model.block_params - model.expert_params, fabric, layout, software)
    ranks = max(1, layout.shard // layout.expert)
    group = replace(layout, shard=ranks, tensor=layout.tensor * layout.expert)
    experts = unit_traffic(model.expert_params, fabric, group, software)
    return UnitTraffic(dense.gather + experts.gather, dense.reduce + experts.reduce)


def copied_bytes(model: ModelSpec, layout: Layout, software: Software) -> float:
    """What a step moves in memory for its collectives: their own writing, and the copies into and
    out of their buffers."""
    params = gathered_params(model, layout) / (layout.tensor * layout.pipeline)
    is_whole = layout.shard * layout.context == 1
    lone = params * software.lone_passes if is_whole and not software.frozen else 0.0
    if is_whole and layout.replicate == 1:
        return lone
    width: float = DTYPE_BYTES[layout.param_dtype]
    reduce = DTYPE_BYTES[layout.reduce_dtype]
    if software.unpack_passes:
        width = _PACKED_WIDTH
    counts = collectives_of(layout, software)
    gathers = counts.in_forward + counts.in_backward
    passes = _IN_PLACE_PASSES if layout.gathers_in_place else 3
    gathered = 0.0 if is_whole else gathers * passes * width
    return lone + params * (gathered + counts.reductions * (width + 2 * reduce))


def exposed_seconds(
    model: ModelSpec,
    fabric: Fabric,
    layout: Layout,
    forward: float,
    backward: float,
    software: Software,
) -> float:
    """Communication of a whole step that compute does not hide; `forward` and `backward` are the
    seconds of one block."""
    if not software.overlaps:
        return _all_in_turn(model, fabric, layout, software)
    layers = model.num_layers / layout.pipeline
    block = block_traffic(model, fabric, layout, software)
    edge = unit_traffic(max(model.embedding_params, model.tail_params), fabric, layout, software)
    counts = collectives_of(layout, software)
    exposed = counts.in_forward * (edge.gather + block.gather) + counts.reductions * edge.reduce
    exposed += counts.in_forward * layers * _beside(block.gather, forward, software)
    again = block.gather if counts.in_backward else 0.0
    reducing = counts.reductions * _beside(again + block.reduce, backward, software)
    others = (layout.accumulation - counts.reductions) * _beside(again, backward, software)
    exposed += layers * (reducing + others)
    return exposed + _replica_seconds(model, fabric, layout, backward * layers, software)


def tensor_seconds(model: ModelSpec, fabric: Fabric, layout: Layout, software: Software) -> float:
    """Gathers and scatters of one block's activations, in its tensor and its context group."""
    if layout.tensor == 1 and layout.context == 1:
        return 0.0
    width = DTYPE_BYTES[layout.param_dtype]
    whole = layout.tokens * model.hidden_size * width
    rounds = 4 + (layout.checkpoint_activations == "full")
    narrow = 0.5 if layout.float8 and software.float8_gathers else 1.0
    gather = rounds * fabric.seconds("all_gather", narrow * whole, layout.tensor)
    scatter = rounds * fabric.seconds("reduce_scatter", whole, layout.tensor)
    tensor = (gather + scatter) * software.tensor_factor * (1 - software.tensor_overlap)
    keys = 2 * layout.tokens * layout.context * model.num_kv_heads * model.head_dim * width
    context = 3 * fabric.seconds("all_gather", keys / layout.tensor, layout.context, layout.tensor)
    # Half of the keys' exchange hides behind the attention of the keys that are there.
    return tensor + context / 2


def expert_seconds(model: ModelSpec, fabric: Fabric, layout: Layout) -> float:
    """Tokens of one block that go to their experts and come back, in forward and in backward."""
    rounds = 4 + 2 * (layout.checkpoint_activations == "full")
    width = DTYPE_BYTES[layout.param_dtype]
    sent = layout.tokens * model.experts_per_token * model.hidden_size * width / layout.tensor
    return rounds * fabric.seconds("all_to_all", sent, layout.expert, layout.tensor)


def _all_in_turn(model: ModelSpec, fabric: Fabric, layout: Layout, software: Software) -> float:
    """Where nothing overlaps: every collective of a step, one after the other."""
    counts = collectives_of(layout, software)
    world = layout.replicate * layout.shard
    # All ranks agree on the tokens, the norm and the loss of a step, and replicas on the norm's
    # last bit.
    total = 3 * fabric.seconds("all_reduce", 8, world)
    total += fabric.seconds("all_reduce", 8, layout.replicate, layout.shard)
    units = [
        (model.block_params, model.num_layers, counts.in_backward),
        (model.embedding_params, 1, counts.in_backward),
        # What forward uses last is what backward needs first: it stays gathered.
        (model.tail_params, 1, 0),
    ]
    for params, times, again in units:
        unit = unit_traffic(params, fabric, layout, software)
        gathers = counts.in_forward + again
        reduced = DTYPE_BYTES[layout.reduce_dtype] * params / layout.shard
        replicas = fabric.seconds("all_reduce", reduced, layout.replicate, layout.shard)
        total += times * (gathers * unit.gather + counts.reductions * unit.reduce + replicas)
    return total


def _beside(traffic: float, compute: float, software: Software) -> float:
    """What traffic adds to the compute that it runs beside."""
    hidden = min(traffic, compute)
    return traffic - hidden + software.contention * hidden


def _gather_width(layout: Layout, software: Software) -> float:
    if software.unpack_passes:
        return _PACKED_WIDTH
    narrow = layout.float8 and layout.float8_gather and software.float8_gathers
    return 1 if narrow else DTYPE_BYTES[layout.param_dtype]


def _replica_seconds(
    model: ModelSpec, fabric: Fabric, layout: Layout, backward: float, software: Software
) -> float:
    """The all-reduce over replicas: beside the last backward, and what is left after it."""
    if layout.replicate == 1 or software.frozen:
        return 0.0
    ranks = layout.shard * layout.context
    shard_params = model.total_params / (layout.tensor * layout.pipeline * ranks)
    units = max(software.replica_pieces, model.num_layers / layout.pipeline + 2)
    unit_bytes = DTYPE_BYTES[layout.reduce_dtype] * shard_params / units * software.link_factor
    stride = ranks * layout.tensor
    unit = fabric.seconds("all_reduce", unit_bytes, layout.replicate, stride)
    return unit + _beside((units - 1) * unit, backward, software)
