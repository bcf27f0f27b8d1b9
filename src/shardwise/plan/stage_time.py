"""How long the stages of a pipeline take, and how long their ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.facts.collective_cost import Fabric
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import DTYPE_BYTES, Decisions
from shardwise.plan.rank_share import num_shards
from shardwise.plan.schedule import Pipeline
from shardwise.plan.software import Software
from shardwise.plan.stage_cuts import sent_bytes, stage_ranges


def pipeline_of(
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    software: Software,
    times: Sequence[tuple[float, float]],
    head: float,
) -> Pipeline:
    """The schedule with the seconds of its stages, from (forward, backward) of one block of each
    rank, and from those of the head with the loss."""
    blocks = [len(stage) for stage in stage_ranges(decided.pipeline_blocks)]
    last = len(blocks) - 1
    # The loss is computed with the gradients of the head, in forward.
    of_stage = [times[stage % decided.pipeline] for stage in range(len(blocks))]
    ahead = [
        count * forward + head * (stage == last)
        for stage, (count, (forward, _)) in enumerate(zip(blocks, of_stage, strict=True))
    ]
    behind = [count * backward for count, (_, backward) in zip(blocks, of_stage, strict=True)]
    return Pipeline(
        decided.pipeline_schedule,
        decided.pipeline,
        decided.accumulation,
        tuple(ahead),
        tuple(behind),
        _send_seconds(model, fabric, decided),
        software.stages_in_slots,
    )


def _send_seconds(model: ModelSpec, fabric: Fabric, decided: Decisions) -> float:
    """The hidden states of a micro-batch, from one stage to the next."""
    sent = sent_bytes(model, decided)
    stride = decided.shard * decided.context * decided.tensor
    # Half of what two ranks gather comes from the other one.
    send = fabric.seconds("all_gather", 2 * sent, 2, stride)
    if not decided.sequence_parallel:
        return send
    return send + fabric.seconds("all_gather", decided.tensor * sent, decided.tensor)


def table_seconds(model: ModelSpec, fabric: Fabric, decided: Decisions) -> float:
    """The first and the last stage exchange their gradients of a tied table once a step, when
    nothing else runs."""
    if decided.pipeline == 1 or not model.tied_embeddings:
        return 0.0
    ranks, stride = decided.pipeline, num_shards(decided) * decided.tensor
    part = DTYPE_BYTES["fp32"] * model.embedding_params / stride
    # Of the ring over all stages it is the slowest link that counts. A ring passes on all of a
    # tensor but the part of one rank.
    return fabric.seconds("all_gather", part * ranks / (ranks - 1), ranks, stride)
