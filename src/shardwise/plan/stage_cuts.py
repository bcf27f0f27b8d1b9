"""How blocks are divided over the stages of a pipeline."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.facts.flops import attention_flops
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.decisions import DTYPE_BYTES, Choice, Choices, Decisions
from shardwise.plan.given import decide

# Schedules in which a rank may have several stages.
MULTI = ("interleaved_1f1b", "zero_bubble")


def num_chunks(config: RunConfig) -> int:
    """Stages on each rank."""
    mesh = config.mesh
    if mesh.pipeline_chunks != "auto":
        return int(mesh.pipeline_chunks)
    return 2 if mesh.pipeline_schedule == "interleaved_1f1b" else 1


def splits_backward(config: RunConfig) -> bool:
    """Whether gradients of weights are computed apart from those of hidden states."""
    return given_axes(config.mesh).pipeline > 1 and config.mesh.pipeline_schedule == "zero_bubble"


def choose_stages(config: RunConfig, model: ModelSpec, ranks: int) -> Choices:
    """The decisions about stages, each with its reason."""
    if ranks == 1:
        why = "every rank has all blocks"
        alone = {"pipeline": 1, "pipeline_schedule": "1f1b", "pipeline_chunks": 1}
        alone |= {"pipeline_blocks": "-", "pipeline_recompute": "-"}
        return {name: Choice(value, why, "rule") for name, value in alone.items()}
    schedule, chunks = config.mesh.pipeline_schedule, num_chunks(config)
    why_chunks = "each rank has one stage" if chunks == 1 else "ranks wait half as long for others"
    head = head_in_blocks(model, config.data.seq_len)
    blocks = "+".join(map(str, balanced_blocks(model.num_layers, ranks * chunks, head)))
    why_blocks = f"stages take about as long: the head and the loss count as {head:.1f} blocks"
    return {
        "pipeline": Choice(ranks, "given", "user"),
        "pipeline_schedule": decide(
            config, "pipeline_schedule", schedule, "one forward and one backward in turn"
        ),
        "pipeline_chunks": decide(config, "pipeline_chunks", chunks, why_chunks),
        "pipeline_blocks": decide(config, "pipeline_blocks", blocks, why_blocks),
        "pipeline_recompute": decide(config, "pipeline_recompute", "-", ""),
    }


def in_stages(config: RunConfig, model: ModelSpec, ranks: int) -> dict[str, Any]:
    """Their values."""
    return {name: choice.value for name, choice in choose_stages(config, model, ranks).items()}


def stage_ranges(blocks: str) -> list[range]:
    """The blocks of each stage."""
    counts = [int(each) for each in blocks.split("+")]
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def blocks_of_stages(decided: Decisions) -> list[int]:
    """The number of blocks of each stage."""
    return list(map(int, decided.pipeline_blocks.split("+")))


def blocks_of_ranks(decided: Decisions) -> list[int]:
    """The number of blocks of each rank, in all of its stages."""
    blocks, ranks = blocks_of_stages(decided), decided.pipeline
    return [sum(blocks[rank::ranks]) for rank in range(ranks)]


def sent_bytes(model: ModelSpec, decided: Decisions) -> int:
    """What a rank sends of the hidden states of a micro-batch. Ranks that divide tokens send a part
    each."""
    parts = decided.tensor if decided.sequence_parallel else 1
    width = DTYPE_BYTES[decided.output_dtype or decided.param_dtype]
    return decided.tokens * model.hidden_size * width // parts


def head_in_blocks(model: ModelSpec, seq_len: int) -> float:
    """The matmul of the head, in those of a mean block with its attention."""
    head = 2.0 * model.vocab_size * model.hidden_size
    blocks = 2.0 * model.block_matmul_params_per_token + attention_flops(model, seq_len)
    return head * model.num_layers / blocks


@cache
def balanced_blocks(num_blocks: int, num_stages: int, head: float) -> tuple[int, ...]:
    """Blocks of each stage, where the last one has the head besides.

    The longest stage is as short as it can be, and of those divisions the first stages, which
    keep the activations of more micro-batches, have the fewest blocks.
    """
    most = next(
        size
        for size in range(-(-num_blocks // num_stages), num_blocks + 1)
        if (num_stages - 1) * size + max(1, min(size, int(size - head))) >= num_blocks
    )
    last = max(1, min(most, int(most - head)))
    left = num_blocks - last
    if left < num_stages - 1:
        last, left = num_blocks - (num_stages - 1), num_stages - 1
    share, more = divmod(left, max(1, num_stages - 1))
    return (*(share + (stage >= num_stages - 1 - more) for stage in range(num_stages - 1)), last)
