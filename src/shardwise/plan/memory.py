"""How many bytes one rank holds at the peak of a step: a closed form over the model's shape.

Parameters, gradients and optimizer state are exact. The peak of a step is one of few moments. When
the loss is computed, all saved activations exist, the head is gathered, and its gradient exists in
fp32 beside a slice of logits or the copy that backward makes of the gradient. When backward enters
the last block, that block's activations exist once more if they are recomputed. Its parameters,
those of the next unit and its own unsharded gradients exist too, beside the head's gradient that is
being reduced. One block later the gradients of a whole block are, which may be larger. At the end
of backward, in the first block and in the embedding, all gradient shards exist beside few
activations.

Where replicas are summed, gradient shards come from another stream's pool, which the allocator does
not give back, so all of them count as reserved.

`plan.block_memory` has what blocks save.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.activations import Activations, activations_of
from shardwise.plan.adam import state_on_device
from shardwise.plan.decisions import DTYPE_BYTES, Decisions, computes_float8
from shardwise.plan.moment import Moment
from shardwise.plan.planned import MemoryEstimate
from shardwise.plan.rank_share import (
    block_share,
    kept_experts,
    num_expert_blocks,
    num_shards,
    trained_block_share,
    trained_share,
    whole_gradients,
)
from shardwise.plan.reserved import (
    context_bytes,
    expert_pool_bytes,
    pool_bytes,
    reduce_buffer_bytes,
)
from shardwise.plan.unit_sizes import (
    UnitSizes,
    frozen_bytes,
    gathered_sizes,
    gathered_total,
    head_params,
    trained_sizes,
    unpacked_bytes,
)
from shardwise.units import GIB

# Master weights and gradient shards are fp32.
PARAM_BYTES, GRAD_BYTES = 4, 4
# Our loss pads the head to a multiple of so many rows: tensor cores want rows of logits that start
# at multiples of 16 bytes, and OLMo 3's matmuls with 100,278 rows ran at a third of the rate.
EVEN_ROWS = 8
# Workspaces of cuBLAS and cuDNN, and rope tables.
WORKSPACE_BYTES = int(0.12 * GIB)
_LAST, _NEXT = "backward of the last block", "backward of the block before"
_SECOND, _FIRST = "backward of the second block", "backward of the first block"
# Of fewer blocks the second is the last, or the one before it.
_SECOND_OF = 3


class _Held(NamedTuple):
    """What every moment of a step asks for, so that it is computed once."""

    sizes: UnitSizes
    """What is gathered for units."""

    trained: UnitSizes
    """What has gradients in them."""

    shard_params: int
    """The trained parameters of a rank's shards."""

    on_device: int
    """Those of them that are not in host memory."""

    grads: int
    """Bytes of gradients at the peak."""

    later: int
    """Bytes of gradients later."""

    freed: int
    """What is gathered for one block and not kept for backward."""

    gathered: int
    """Bytes of parameters that stay gathered from forward to backward."""

    buffer: int
    """Bytes of the buffer of reductions."""


def _held_by(model: ModelSpec, cluster: ClusterSpec, decided: Decisions) -> _Held:
    sizes, shard_params = gathered_sizes(model, decided), trained_share(model, decided)
    on_device = 0 if decided.offload else shard_params
    return _Held(
        sizes,
        trained_sizes(model, decided),
        shard_params,
        on_device,
        *gradient_bytes(model, decided, on_device),
        _freed_block(model, decided, sizes),
        _gathered_bytes(model, decided, sizes),
        reduce_buffer_bytes(model, decided, cluster),
    )


def estimate_memory(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, *, loss_bytes: int | None = None
) -> MemoryEstimate:
    """Expected bytes of one rank at the peak of a step.

    `loss_bytes` is for other stacks: the bytes of their head's gradient and logits.
    """
    return estimate_with(activations_of(model, decided), model, cluster, decided, loss_bytes)


def estimate_with(
    blocks: Activations,
    model: ModelSpec,
    cluster: ClusterSpec,
    decided: Decisions,
    loss_bytes: int | None = None,
) -> MemoryEstimate:
    """The same where it is known what blocks save."""
    held = _held_by(model, cluster, decided)
    moments = _that_may_bind(model, held, decided, blocks, loss_bytes)
    peak = max(moments, key=lambda moment: moment.total)
    pools = pool_bytes(model, cluster, decided, blocks.kept)
    return _estimate_at(peak, held.grads, pools, held, model, cluster, decided)


def memory_over_step(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions
) -> dict[str, MemoryEstimate]:
    """The same at every moment that is computed, by what runs then, in the order of a step; one of
    them is the peak. Between steps and in the optimizer there are only states."""
    held, blocks = _held_by(model, cluster, decided), activations_of(model, decided)
    pools = pool_bytes(model, cluster, decided, blocks.kept)

    def at(moment: Moment, grads: int) -> MemoryEstimate:
        return _estimate_at(moment, grads, pools, held, model, cluster, decided)

    largest: dict[str, Moment] = {}
    for moment in _that_may_bind(model, held, decided, blocks, None):
        known = largest.get(moment.where)
        largest[moment.where] = max(known or moment, moment, key=lambda each: each.total)
    at_update = held.later if decided.replicate == 1 else 0
    return {
        "between steps": at(_nothing("between steps"), 0),
        **{where: at(moment, held.grads) for where, moment in largest.items()},
        "optimizer": at(_nothing("optimizer"), at_update if held.later else held.grads),
    }


def _nothing(where: str) -> Moment:
    return Moment(where, where, gathered=0, buffers=0, activations=0)


def _that_may_bind(
    model: ModelSpec,
    held: _Held,
    decided: Decisions,
    blocks: Activations,
    loss_bytes: int | None,
) -> list[Moment]:
    """The moments that may be the peak, in the order of a step."""
    moments = [
        _at_loss(model, held, decided, blocks.kept, loss_bytes),
        *_in_backward(model, held, decided, blocks),
    ]
    if held.later and decided.replicate == 1:
        moments += _at_end(model, held, decided, blocks)
    return moments


def _estimate_at(
    moment: Moment,
    grads: int,
    pools: int,
    held: _Held,
    model: ModelSpec,
    cluster: ClusterSpec,
    decided: Decisions,
) -> MemoryEstimate:
    """What a rank holds at a moment, with `grads` bytes of gradients of earlier micro-batches, and
    `pools` bytes that the allocator reserves besides."""
    frozen = frozen_bytes(model, decided)
    on_device = 0 if decided.offload else 1
    return MemoryEstimate(
        peak=moment.name,
        params=held.on_device * PARAM_BYTES + frozen * on_device,
        frozen=frozen * on_device,
        grads=grads + int(moment.grads),
        outer=held.shard_params * decided.outer_bytes,
        optimizer=state_on_device(model, held.shard_params, decided),
        gathered=int(moment.gathered),
        buffers=int(moment.buffers),
        activations=int(moment.activations),
        recompute=int(moment.recompute),
        loss=int(moment.loss),
        allocator=(held.later if decided.replicate > 1 else 0) + pools,
        unsure=expert_pool_bytes(model, cluster, decided),
        context=context_bytes(cluster),
        guessed=model.source == "counted" and not model.kinds,
    )


def gradient_bytes(model: ModelSpec, decided: Decisions, shard_params: int) -> tuple[int, int]:
    """(bytes at the peak, bytes later). At the peak there are only gradients of earlier
    micro-batches."""
    shards = shard_params * GRAD_BYTES
    if decided.accumulation == 1:
        return 0, shards
    if decided.accumulates_unsharded:
        return whole_gradients(model, decided) * GRAD_BYTES, shards
    return shards, 0


def _at_loss(
    model: ModelSpec, held: _Held, decided: Decisions, kept: float, loss_bytes: int | None
) -> Moment:
    """The head's fp32 gradient, and beside it one slice of logits, or the copy of the gradient
    to reduce."""
    width, tokens = DTYPE_BYTES[decided.param_dtype], decided.tokens
    # The last unit stays gathered. The block before it is gathered ahead, after the buffer of the
    # last all-gather was freed. In place that buffer is small, and the peak comes before.
    ahead = 0 if decided.gather_in_place else held.freed
    buffers = 0 if decided.keeps_gathered else width * (held.sizes.head + ahead)
    loss = float(
        _loss_bytes(model, held.trained.head, decided) if loss_bytes is None else loss_bytes
    )
    # The last hidden state, its norm, and their gradients; token ids and labels.
    tail = 5 * width * model.hidden_size + 32
    # The head's gradient lies in the buffer, which may be larger.
    lies_there = 4 * held.trained.head
    loss += tokens * tail + WORKSPACE_BYTES + max(0, held.buffer - lies_there)
    return Moment("loss", "loss", held.gathered, buffers, kept, loss)


def _loss_bytes(model: ModelSpec, head: int, decided: Decisions) -> int:
    width = DTYPE_BYTES[decided.param_dtype]
    if decided.slice_tokens is None:
        whole = decided.tokens * model.vocab_size // decided.tensor
        # Backward has log-probabilities, their gradient and that of the logits at once, all in
        # fp32. The head's gradient comes after them.
        return max(12 * whole, width * whole + 2 * width * head)
    logits = min(decided.tokens, decided.slice_tokens) * model.vocab_size // decided.tensor
    # Logits are overwritten by their gradient. Without our kernel and the compiler there are four
    # fp32 copies on the way.
    logit_bytes = width if decided.compile or decided.own_kernels else 16 + width
    # An odd head is copied, with rows of zeros below it.
    is_odd = decided.own_kernels and model.vocab_size % EVEN_ROWS
    copied = width * head_params(model, decided) if is_odd else 0
    return copied + max((4 + width) * head, 4 * head + logits * logit_bytes)


def _in_backward(
    model: ModelSpec, held: _Held, decided: Decisions, blocks: Activations
) -> list[Moment]:
    """Moments at which backward is inside a block: the last one, and the one before it."""
    width, reduce = DTYPE_BYTES[decided.param_dtype], DTYPE_BYTES[decided.reduce_dtype]
    sizes, trained, gathered, buffer = held.sizes, held.trained, held.gathered, held.buffer
    # The block and the one before it are gathered.
    own = width * 2 * held.freed
    own += unpacked_bytes(model, decided)
    # A tied head stays gathered beside its gradient, until the embedding has its own.
    waiting = width * (sizes.head + trained.head) if model.tied_embeddings else 0
    # The gradients of the head are being reduced first, those of the last block next.
    first, next_one = waiting or reduce * trained.head, waiting + reduce * trained.block
    first, next_one = max(first, buffer), max(next_one, buffer)
    kept, less = blocks.kept, blocks.kept * (1 - 1 / model.num_layers)
    found = [
        Moment(where, "backward", gathered, own + weights + reduced, saved, recompute=inside)
        for inside, weights in blocks.states
        for where, reduced, saved in ((_LAST, first, kept), (_NEXT, next_one, less))
    ]
    if blocks.again and not decided.compile and not model.tied_embeddings and trained.head:
        # Without the compiler the head's gradients are still alive when the recomputation starts,
        # and those of the block do not exist yet.
        alive = (8 + 2 * width) * trained.head
        found.append(Moment(_LAST, "backward", gathered, own + alive, kept, recompute=blocks.again))
    return found


def _at_end(model: ModelSpec, held: _Held, decided: Decisions, blocks: Activations) -> list[Moment]:
    """The end of backward: in the second and the first block, and where the embedding's gradient is
    reduced. Between its ends a backward keeps less with each block and has more gradients."""
    width, reduce = DTYPE_BYTES[decided.param_dtype], DTYPE_BYTES[decided.reduce_dtype]
    sizes, trained, buffer = held.sizes, held.trained, held.buffer
    first = blocks.kept / model.num_layers
    gathered = held.gathered / model.num_layers
    # A tied table is gathered, and has a gradient since the loss.
    waiting = width * (sizes.table + trained.table) if model.tied_embeddings else 0
    # A rank that is alone keeps its gradients where they are reduced.
    reducing = max(buffer, reduce * trained.block) if num_shards(decided) > 1 else 0
    others = GRAD_BYTES * (held.shard_params - trained.table / num_shards(decided))
    block = GRAD_BYTES * trained_block_share(model, decided)
    last = max(waiting, width * trained.table) + max(buffer, reduce * trained.table)
    unpacked = unpacked_bytes(model, decided)
    # The second block is gathered beside the first one, which comes next.
    places = ((_FIRST, 1), (_SECOND, 2)) if model.num_layers > _SECOND_OF else ((_FIRST, 1),)
    in_blocks = [
        Moment(
            where,
            "backward",
            gathered * count,
            width * count * held.freed + unpacked + weights + waiting + reducing,
            first * count,
            recompute=inside,
            grads=others - count * block,
        )
        for where, count in places
        for inside, weights in blocks.states
    ]
    in_embedding = Moment(
        "gradient of the embedding", "backward", gathered, last, first, grads=others
    )
    return [*in_blocks, in_embedding]


def _freed_block(model: ModelSpec, decided: Decisions, sizes: UnitSizes) -> int:
    """What a rank gathers for one block and does not keep for backward."""
    if decided.keeps_gathered:
        return 0
    kept = kept_experts(model, decided) // max(1, num_expert_blocks(model))
    return max(0, sizes.block - kept)


def _gathered_bytes(model: ModelSpec, decided: Decisions, sizes: UnitSizes) -> int:
    """Parameters that stay gathered from forward to backward."""
    if decided.keeps_gathered:
        width = DTYPE_BYTES[decided.param_dtype]
        in_block = 1 if computes_float8(model, decided) and decided.float8_gather else width
        blocks = model.num_layers * sizes.block
        return blocks * in_block + (gathered_total(model, decided) - blocks) * width
    rowwise = decided.float8_rowwise and computes_float8(model, decided)
    if rowwise and decided.checkpoint_activations == "none":
        # Cast weights are kept, one byte each.
        return model.num_layers * block_share(model, decided)
    return DTYPE_BYTES[decided.param_dtype] * kept_experts(model, decided)
