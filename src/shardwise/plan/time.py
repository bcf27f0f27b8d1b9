"""How long a step takes: the cost of each kernel and collective, and which hide behind which.

`plan.block_time` has the seconds of a block. Collectives hide behind compute as far as
`plan.traffic` says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import log2

from shardwise.facts.collective_cost import Fabric
from shardwise.facts.flops import efficiency_of, recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.activations import waiting_in_host
from shardwise.plan.adam import ADAM_BYTES, matrix_params
from shardwise.plan.block_time import BlockTime, block_seconds
from shardwise.plan.communication import (
    block_traffic,
    collectives_of,
    copied_bytes,
    expert_seconds,
    exposed_seconds,
    tensor_seconds,
)
from shardwise.plan.decisions import DTYPE_BYTES, Decisions
from shardwise.plan.host_time import host_seconds
from shardwise.plan.rank_share import num_shards, stored_params, trained_share
from shardwise.plan.schedule import seconds_of_step
from shardwise.plan.software import OURS, Software
from shardwise.plan.stage_recompute import mean_of_blocks, modes_of, on_rank, share_recomputed
from shardwise.plan.stage_time import pipeline_of

__all__ = ["OURS", "Software", "Speed", "TimeEstimate", "estimate_time", "speed_of"]

# Of a parameter: it, its gradient and its update are read and written some times.
_ADAFACTOR_BYTES = 48
# Lion's five kernels move 52 bytes of a parameter, where AdamW's one moves 28.
_MORE_FOR_LION = 24
# Bytes a second of a rank that is alone, and of all ranks of a host together: copies of parameters
# and gradients, and Adam's numbers. Fitted to Llama 3.2 1B and 3B on an H200 with 16 cores; hosts
# of eight ranks were not measured.
_PCIE, _HOST_ADAM = (50e9, 200e9), (120e9, 480e9)
# Gradients that FSDP2 adds to earlier ones in host memory. It copies them to new memory that is not
# page-locked, waits, and adds. A core writes new memory at 1.2 GB/s, and adds at 4.4.
_ADDED_BYTES_PER_S = 1e9
# Copies of activations between device and page-locked memory, each way, over 16 lanes of PCIe 5.
_ACTIVATION_BYTES_PER_S = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of one optimizer step by what they are spent on; `exposed` is communication that
    nothing hides, `waiting` what ranks wait for the slowest."""

    matmul: float
    attention: float
    elementwise: float
    loss: float
    recompute: float
    copies: float
    launch: float
    tensor_parallel: float
    expert_parallel: float
    exposed: float
    waiting: float
    bubble: float
    optimizer: float
    offload: float
    other: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed that follows from a step time."""

    step_s: float
    tokens_per_s: float
    """Tokens per second of one device."""

    mfu: float | None
    hfu: float | None
    tokens_to_hide: int
    """Tokens of a micro-batch from which on the unit collectives hide behind compute."""


def estimate_time(
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    rates: Rates,
    software: Software = OURS,
) -> TimeEstimate:
    """Expected seconds of one optimizer step, by term."""
    if _is_cut(decided) and not software.compiles_cut_blocks:
        decided = replace(decided, compile=False)
    passes = decided.accumulation
    layers = model.num_layers / decided.pipeline
    block = block_seconds(model, decided, rates, software)
    loss, head_matmul = _loss_seconds(model, decided, rates, software)
    again = mean_of_blocks(decided, lambda how: _recompute_seconds(how, block, software))
    tensor = mean_of_blocks(decided, lambda how: tensor_seconds(model, fabric, how, software))
    expert = mean_of_blocks(decided, lambda how: expert_seconds(model, fabric, how, software))
    forward, backward = block.forward, block.backward + again
    copied = software.copy_factor * copied_bytes(model, decided, software)
    host = mean_of_blocks(decided, lambda how: host_seconds(model, how, rates, software))
    # The host runs ahead of the device, and costs time only where a micro-batch's kernels are
    # shorter than their launches.
    once = loss + head_matmul + copied / rates.memory_bytes_per_s / passes
    short = max(0.0, host - (forward + backward + once / layers) * software.overlaps)
    of_block = forward + backward + short + tensor + expert
    busy = passes * (layers * of_block + loss + head_matmul)
    stored = stored_params(model, decided) / decided.pipeline
    trained = trained_share(model, decided) / decided.pipeline
    return TimeEstimate(
        matmul=passes * (layers * block.matmul + head_matmul),
        attention=passes * layers * block.attention,
        elementwise=passes * layers * block.elementwise,
        loss=passes * loss,
        recompute=passes * layers * again,
        copies=copied / rates.memory_bytes_per_s,
        launch=passes * layers * short,
        tensor_parallel=passes * layers * tensor,
        expert_parallel=passes * layers * expert,
        exposed=exposed_seconds(model, fabric, decided, forward, backward, software),
        waiting=software.wait_share * _doublings(fabric, decided) * busy,
        bubble=_bubble_seconds(model, fabric, decided, software, block, short, loss + head_matmul),
        optimizer=_optimizer_seconds(trained, decided, rates, software)
        + _whole_matrix_seconds(model, decided, rates),
        offload=_offload_seconds(stored, decided, fabric, software, layers * forward)
        + passes * _exposed_activation_seconds(model, decided, layers * forward, layers * backward),
        other=software.step_s
        + passes * software.pass_s
        + (forward_seconds(model, fabric, decided, rates, software) if decided.kl_term else 0.0),
    )


def _is_cut(decided: Decisions) -> bool:
    """Whether blocks are checkpointed selectively around experts that are dealt out."""
    return decided.expert > 1 and "selective" in modes_of(decided)


def speed_of(
    estimate: TimeEstimate,
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    rates: Rates,
    peak_flops: float | None,
    software: Software = OURS,
) -> Speed:
    """Tokens per second, MFU and HFU."""
    split = decided.tensor * decided.pipeline
    tokens = decided.tokens * decided.accumulation / split
    per_s = tokens / estimate.total
    shares = None
    if peak_flops is not None:
        again = share_recomputed(decided)
        shares = efficiency_of(model, decided.seq_len, again, per_s, peak_flops)
    return Speed(
        step_s=estimate.total,
        tokens_per_s=per_s,
        mfu=shares.mfu if shares else None,
        hfu=shares.hfu if shares else None,
        tokens_to_hide=_tokens_to_hide(model, fabric, decided, rates, software),
    )


def forward_seconds(
    model: ModelSpec, fabric: Fabric, decided: Decisions, rates: Rates, software: Software = OURS
) -> float:
    """Expected seconds of a forward over the sequences of one step, as a reference takes it."""
    block = block_seconds(model, decided, rates, software)
    gather = block_traffic(model, fabric, decided, software).gather
    loss, matmul = _loss_seconds(model, replace(decided, objective="none"), rates, software)
    head = loss + matmul / (2 if software.frozen else 3)
    return decided.accumulation * (model.num_layers * max(block.forward, gather) + head)


def _loss_seconds(
    model: ModelSpec, decided: Decisions, rates: Rates, software: Software
) -> tuple[float, float]:
    """(element-wise, matmul) seconds of the head and the cross-entropy."""
    vocab = model.vocab_size / decided.tensor
    last_stage = 1.0 / decided.pipeline  # one stage of several has it
    tokens = decided.tokens * last_stage
    flops = rates.matmul_flops[decided.param_dtype] * software.matmul_factor
    passes = (2 if software.frozen else 3) + decided.compares
    matmul = passes * 2.0 * tokens * vocab * model.hidden_size / (flops * software.head_factor)
    gradient = 0.0
    if decided.slice_tokens is not None and not software.frozen:
        # The head's gradient is accumulated in fp32 once a slice, mostly hidden behind the matmul.
        slices = -(-decided.tokens // decided.slice_tokens)
        gradient = slices * 2.0 * vocab * model.hidden_size * last_stage
    moved = tokens * vocab * software.loss_passes * (1 + decided.compares) + gradient
    return moved / rates.memory_bytes_per_s, matmul


def _recompute_seconds(decided: Decisions, block: BlockTime, software: Software) -> float:
    """Seconds that one block recomputes in backward."""
    if decided.checkpoint_activations == "none":
        return 0.0
    if decided.checkpoint_activations == "selective":
        return block.selective + software.selective_recompute * block.matmul_forward
    again = block.forward - software.stops_early * block.last_matmul
    return recomputed_share(decided.checkpoint_activations) * again


def _doublings(fabric: Fabric, decided: Decisions) -> float:
    """The number of doublings from one node to all."""
    ranks = decided.replicate * decided.shard * decided.context * decided.tensor * decided.pipeline
    return log2(max(1.0, ranks / fabric.domain))


def _bubble_seconds(
    model: ModelSpec,
    fabric: Fabric,
    decided: Decisions,
    software: Software,
    block: BlockTime,
    short: float,
    head: float,
) -> float:
    """What ranks wait for each other in the schedule of their stages, as a mean over ranks.

    `short` is what a block waits for its launches, and `head` the head's and the loss's mean over
    ranks.
    """
    if decided.pipeline == 1:
        return 0.0

    def on(own: Decisions) -> tuple[float, float]:
        """Forward and backward of one block, with all that its ranks wait for in it."""
        backward = block.backward + _recompute_seconds(own, block, software)
        whole = block.forward + backward + short + tensor_seconds(model, fabric, own, software)
        whole += expert_seconds(model, fabric, own, software)
        ahead = block.forward / (block.forward + backward)
        return ahead * whole, (1 - ahead) * whole

    times = [on(on_rank(decided, rank)) for rank in range(decided.pipeline)]
    pipeline = pipeline_of(model, fabric, decided, software, times, head * decided.pipeline)
    ranks = range(pipeline.ranks)
    return seconds_of_step(pipeline) - sum(map(pipeline.busy, ranks)) / pipeline.ranks


def _optimizer_seconds(
    shard_params: float, decided: Decisions, rates: Rates, software: Software
) -> float:
    # Adapters are so few that their update does not show.
    if software.frozen or decided.offload:
        return 0.0
    # Two moments are read and written. Codes, and Lion's update, are made in small kernels, whose
    # floats go through memory; that was counted and not measured.
    more = {"bf16": -8, "int8": 200}.get(decided.optimizer_state, 0)
    more += _MORE_FOR_LION if decided.optimizer == "lion" else 0
    shard_params /= decided.replicate if software.splits_update else 1
    update = (software.optimizer_passes + more) * shard_params / rates.memory_bytes_per_s
    if not decided.offload_optimizer:
        return update
    # Moments come and go at once, each over its own direction of PCIe.
    return max(update, ADAM_BYTES * shard_params / _ACTIVATION_BYTES_PER_S)


def _whole_matrix_seconds(model: ModelSpec, decided: Decisions, rates: Rates) -> float:
    """Updates of whole matrices, which every rank computes all of. Their gathers are left out."""
    if decided.optimizer == "muon":
        # Five steps of three products; the matrices of a block are about three times as wide as
        # high.
        flops = 5 * (4 + 2 / 3) * model.hidden_size * matrix_params(model)
        return flops / rates.matmul_flops.get("bf16", min(rates.matmul_flops.values()))
    if decided.optimizer == "adafactor":
        return _ADAFACTOR_BYTES * model.trained_params / rates.memory_bytes_per_s
    return 0.0


def _offload_seconds(
    shard_params: float, decided: Decisions, fabric: Fabric, software: Software, forward: float
) -> float:
    """Copies of parameters from the host and of gradients to it, and Adam in host memory, which
    the next forward may run beside."""
    if not decided.offload:
        return 0.0
    stored = software.packed_width if software.unpack_passes else None
    width = stored or DTYPE_BYTES[decided.param_dtype]
    counts = collectives_of(decided, software)
    gathers = counts.in_forward + counts.in_backward
    ranks = min(decided.world_size, fabric.domain)
    pcie, memory = (min(alone, shared / ranks) for alone, shared in (_PCIE, _HOST_ADAM))
    seconds = gathers * width * shard_params / pcie
    if software.frozen:
        return seconds
    if not decided.accumulates_unsharded:
        seconds += (decided.accumulation - 1) * 4 * shard_params / _ADDED_BYTES_PER_S
    adam = 32 * shard_params / memory
    if decided.overlap_optimizer:
        adam = max(0.0, adam - forward)
    return seconds + 4 * shard_params / pcie + adam


def _exposed_activation_seconds(
    model: ModelSpec, decided: Decisions, forward: float, backward: float
) -> float:
    """What forward waits for activations to be copied out, and backward for them to be copied back.

    torch's copy of gathered parameters queues behind these copies, so nothing runs beside them.
    """
    one_way = waiting_in_host(model, decided) / _ACTIVATION_BYTES_PER_S
    beside = backward if decided.own_kernels or num_shards(decided) == 1 else 0.0
    return max(0.0, one_way - forward) + max(0.0, one_way - beside)


def _tokens_to_hide(
    model: ModelSpec, fabric: Fabric, decided: Decisions, rates: Rates, software: Software
) -> int:
    """Tokens at which a block's backward takes as long as its all-gather and reduce-scatter."""
    traffic = block_traffic(model, fabric, decided, software)
    block = block_seconds(model, decided, rates, software)
    recomputed = mean_of_blocks(decided, lambda how: _recompute_seconds(how, block, software))
    backward = block.backward + recomputed
    again = traffic.gather - traffic.kept
    in_backward = again * (not decided.keeps_gathered) + traffic.reduce
    needed = max(in_backward / backward, traffic.gather / block.forward)
    return round(decided.tokens * needed)
