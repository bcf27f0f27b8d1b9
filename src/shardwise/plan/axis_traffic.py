"""What a step of one rank moves along each axis of the mesh: bytes, and their time on the links.

Bytes are those of whole tensors: the output of an all-gather, the input of any other collective. A
rank of a pipeline counts what it sends, as a mean over ranks. The numbers on which ranks agree
(norms, losses, counts of tokens) and gradients of what ranks along `tensor` keep whole are too
small to count.

The seconds are those of one collective after the other. How many of them compute hides is in the
terms of a forecast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.facts.block_work import Attention
from shardwise.facts.collective_cost import Collective, Fabric
from shardwise.facts.flops import recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.plan.communication import collectives_of, gather_width
from shardwise.plan.decisions import DTYPE_BYTES, Decisions
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import (
    num_expert_blocks,
    num_expert_shards,
    num_shards,
    trained_share,
    whole_gradients,
)
from shardwise.plan.software import software_of
from shardwise.plan.stage_cuts import sent_bytes, stage_ranges
from shardwise.plan.stage_recompute import mean_of_blocks, share_recomputed
from shardwise.plan.unit_sizes import gathered_total

# In the order of ranks; neighbours on the last one are neighbours in rank.
AXES = ("replicate", "pipeline", "shard", "context", "tensor", "expert")
_REGIONS = 2
"""Parts of a block that ranks along `tensor` compute together: attention and MLP."""


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one rank moves along one axis in a step."""

    num_bytes: float
    seconds: float
    """Of its collectives, one after the other."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Collectives of one kind over one group, in a whole step."""

    axis: str
    kind: Collective | Literal["send"]
    num_bytes: float
    calls: float
    ranks: int
    stride: int

    def seconds(self, fabric: Fabric) -> float:
        """One after the other."""
        each = self.num_bytes / self.calls
        if self.kind == "send":  # half of what two ranks gather comes from the other one
            return self.calls * fabric.seconds("all_gather", 2 * each, 2, self.stride)
        return self.calls * fabric.seconds(self.kind, each, self.ranks, self.stride)


def traffic_to_dict(
    counted: Mapping[str, AxisTraffic], planned: Mapping[str, AxisTraffic]
) -> dict[str, dict[str, float | None]]:
    """What was counted along each axis beside what was planned, for JSON."""
    none = AxisTraffic(0.0, 0.0)
    return {
        axis: {
            "bytes": counted.get(axis, none).num_bytes,
            "seconds": counted.get(axis, none).seconds,
            "planned_bytes": planned.get(axis, none).num_bytes,
            "planned_s": planned.get(axis, none).seconds,
        }
        for axis in AXES
        if axis in counted or axis in planned
    }


def planned_traffic(plan: Plan) -> dict[str, AxisTraffic]:
    """By axis, of those along which anything moves."""
    found: dict[str, AxisTraffic] = {}
    moves = [move for move in _moves(plan) if move.ranks > 1 and move.num_bytes]
    for axis in AXES:
        along = [move for move in moves if move.axis == axis]
        if along:
            seconds = sum(move.seconds(plan.cluster.fabric) for move in along)
            found[axis] = AxisTraffic(sum(move.num_bytes for move in along), seconds)
    return found


def _moves(plan: Plan) -> Iterator[_Move]:
    model, decided = plan.model, plan.decided
    yield from _of_units(plan)
    yield from _along_pipeline(model, decided)
    yield from _along_context(model, decided)
    yield from _along_tensor(model, decided)
    yield from _along_expert(model, decided)


@dataclass(frozen=True, slots=True)
class _Sharded:
    """Parameters that FSDP2 shards over one group, of which a rank gathers so many."""

    gathered: float
    again: float
    """Those that backward needs, and that are not gathered any more."""

    trained: float
    blocks: int
    ends: int
    """Units beside the blocks'."""

    ranks: int
    stride: int


def _of_units(plan: Plan) -> Iterator[_Move]:
    """FSDP2 gathers parameters and reduces gradients."""
    model, decided = plan.model, plan.decided
    software = software_of(plan.cluster.device, model, decided)
    counts, width = collectives_of(decided, software), gather_width(model, decided, software)
    reduced, stages = DTYPE_BYTES[decided.reduce_dtype], decided.pipeline
    reductions = counts.reductions or 1  # of adapters, where what they belong to has none
    for each in _sharded(model, decided):
        group, units = (each.ranks, each.stride), each.blocks + each.ends
        numbers = counts.in_forward * each.gathered + counts.in_backward * each.again
        gathers = counts.in_forward * units
        gathers += counts.in_backward * each.blocks * (each.again > 0)
        yield _Move("shard", "all_gather", width * numbers / stages, gathers / stages, *group)
        sums, times = reductions * each.trained, reductions * units
        yield _Move("shard", "reduce_scatter", reduced * sums / stages, times / stages, *group)
    own = reduced * trained_share(model, decided) / stages
    stride = num_shards(decided) * decided.tensor * stages
    calls = model.num_layers / stages + 2
    yield _Move("replicate", "all_reduce", own, calls, decided.replicate, stride)


def _sharded(model: ModelSpec, decided: Decisions) -> Iterator[_Sharded]:
    gathered, trained = gathered_total(model, decided), whole_gradients(model, decided)
    experts = 0.0
    if decided.expert > 1:
        experts = model.expert_params * num_expert_blocks(model) / decided.expert
        changed = 0.0 if model.adapter else experts
        blocks, group = num_expert_blocks(model), (num_expert_shards(decided), decided.expert)
        again = experts if decided.frees_experts else 0.0
        yield _Sharded(experts, again, changed, blocks, 0, *group)
        trained -= round(changed)
    # A lookup's gradient needs no table, and what forward uses last stays gathered for backward.
    ends = (model.embedding_params + model.tail_params) / decided.tensor
    if model.tied_embeddings and decided.pipeline > 1:  # the first and the last stage have it
        table = model.embedding_params // decided.tensor
        gathered, trained, ends = gathered + table, trained + table, ends + table
    whole, group = gathered - experts, (num_shards(decided), decided.tensor)
    yield _Sharded(whole, whole - ends, trained, model.num_layers, 2, *group)


def _along_pipeline(model: ModelSpec, decided: Decisions) -> Iterator[_Move]:
    """Hidden states go to the next stage, and their gradients come back."""
    if decided.pipeline == 1:
        return
    calls = 2 * (_num_stages(decided) - 1) * decided.accumulation / decided.pipeline
    place = (decided.pipeline, num_shards(decided) * decided.tensor)
    yield _Move("pipeline", "send", calls * sent_bytes(model, decided), calls, *place)
    if model.tied_embeddings:  # the first and the last stage exchange their gradients of the table
        table = DTYPE_BYTES["fp32"] * model.embedding_params / num_shards(decided) / decided.tensor
        both = 2 / decided.pipeline
        yield _Move("pipeline", "send", both * table, both, *place)


def _num_stages(decided: Decisions) -> int:
    return 1 if decided.pipeline == 1 else len(stage_ranges(decided.pipeline_blocks))


def _along_context(model: ModelSpec, decided: Decisions) -> Iterator[_Move]:
    """Keys and values go to the ranks that see them, and their gradients come back."""
    if decided.context == 1:
        return
    again = mean_of_blocks(decided, _gathered_again)
    width = DTYPE_BYTES[decided.param_dtype] / decided.tensor
    for blocks, attention in _attentions(model):
        channels = attention.kv_heads * (attention.key_width + attention.value_width)
        calls = decided.accumulation * blocks / decided.pipeline
        chunk, reach = decided.seq_len // (2 * decided.context), (attention.window or 0) - 1
        if 0 <= reach <= chunk:  # only the ends of chunks travel, between neighbours
            ends = 2 * (decided.context - 1) / decided.context
            sent = ends * decided.micro_batch * reach * channels * width
            times = calls * (2 + again)
            yield _Move("context", "all_to_all", times * sent, times, *_contexts(decided))
            continue
        whole = decided.tokens * decided.context * channels * width
        gathers = calls * (1 + again)
        yield _Move("context", "all_gather", gathers * whole, gathers, *_contexts(decided))
        yield _Move("context", "all_to_all", calls * whole, calls, *_contexts(decided))


def _contexts(decided: Decisions) -> tuple[int, int]:
    return decided.context, decided.tensor


def _attentions(model: ModelSpec) -> Iterator[tuple[int, Attention]]:
    """(blocks, attention) of each kind of block."""
    for kind in model.kinds:
        for attention in kind.work.attentions:
            yield kind.count, attention
    if not model.kinds:
        width = model.head_dim
        plain = Attention(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            key_width=width,
            value_width=width,
            window=model.attention_window,
        )
        yield model.num_layers, plain


def _along_tensor(model: ModelSpec, decided: Decisions) -> Iterator[_Move]:
    """Rows are gathered before a part of a block, and sums of rows scattered after it. All ranks
    sum what they looked up of the embedding, and the gradient of what the head is given."""
    ranks = decided.tensor
    if ranks == 1:
        return
    passes, blocks = decided.accumulation, model.num_layers / decided.pipeline
    hidden = decided.tokens * model.hidden_size * DTYPE_BYTES[decided.param_dtype]
    dealt = num_expert_blocks(model) / decided.pipeline if decided.expert > 1 else 0.0
    regions = _REGIONS * blocks - dealt
    # A recomputation ends with the last tensor that backward needs, before a block's last sum.
    again = share_recomputed(decided)
    sums = again * (regions - blocks)
    ends = 1 / decided.pipeline  # of all stages, the first has the embedding and the last the head
    whole = 2 * ends
    if decided.sequence_parallel:
        gathers = mean_of_blocks(decided, _gathered_again)
        # A stage begins and the last one ends with whole sequences.
        edges = 2 * _num_stages(decided) * ends
        gathered = passes * ((2 + gathers) * regions + edges)
        scattered = passes * (2 * regions + sums)
        yield _Move("tensor", "all_gather", gathered * hidden, gathered, ranks, 1)
        yield _Move("tensor", "reduce_scatter", scattered * hidden, scattered, ranks, 1)
    else:
        whole += 2 * regions + sums
    yield _Move("tensor", "all_reduce", passes * whole * hidden, passes * whole, ranks, 1)
    # Of each token the loss needs two numbers of every rank.
    slices = passes * ends * -(-decided.tokens // (decided.slice_tokens or decided.tokens))
    figures = passes * ends * decided.tokens * 8 * ranks
    yield _Move("tensor", "all_gather", figures, slices, ranks, 1)


def _along_expert(model: ModelSpec, decided: Decisions) -> Iterator[_Move]:
    """Rows of tokens go to their experts and back, in forward and in backward, with their weights
    in the first direction alone."""
    if decided.expert == 1:
        return
    blocks = decided.accumulation * num_expert_blocks(model) / decided.pipeline
    rows = decided.tokens * model.experts_per_token / decided.tensor
    width = DTYPE_BYTES[decided.param_dtype]
    # A selective recomputation keeps what came.
    again = share_recomputed(decided)
    for calls, numbers in ((blocks * (4 + again), model.hidden_size), (blocks * (2 + again), 1)):
        sent = calls * rows * numbers * width
        yield _Move("expert", "all_to_all", sent, calls, decided.expert, 1)


def _gathered_again(decided: Decisions) -> float:
    """How often a recomputation gathers what a block begins with. A selective one keeps sums."""
    mode = decided.checkpoint_activations
    return 1.0 if mode == "selective" else recomputed_share(mode)
