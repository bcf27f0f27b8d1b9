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

from dataclasses import dataclass

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.adam import adam_on_device
from shardwise.plan.block_memory import (
    expert_row_bytes,
    has_lean_experts,
    num_recomputed,
    recomputed_bytes,
)
from shardwise.plan.decisions import DTYPE_BYTES, Decisions, computes_float8
from shardwise.plan.host import chosen, patience
from shardwise.plan.plan import MemoryEstimate
from shardwise.plan.rank_share import (
    block_share,
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
from shardwise.plan.shared_blocks import entry_bytes, shared_bytes
from shardwise.plan.unit_sizes import (
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


@dataclass(frozen=True, slots=True)
class _Moment:
    """What a step holds at one moment, besides parameters, optimizer state and the gradients of
    earlier micro-batches."""

    name: str
    gathered: float
    buffers: float
    activations: float
    loss: float = 0.0
    recompute: float = 0.0
    grads: float = 0.0
    """Shards of this micro-batch."""

    @property
    def total(self) -> float:
        return (
            self.gathered
            + self.buffers
            + self.activations
            + self.loss
            + self.recompute
            + self.grads
        )


def estimate_memory(
    model: ModelSpec, cluster: ClusterSpec, decided: Decisions, *, loss_bytes: int | None = None
) -> MemoryEstimate:
    """Expected bytes of one rank at the peak of a step.

    `loss_bytes` is for other stacks: the bytes of their head's gradient and logits.
    """
    shard_params = trained_share(model, decided)
    frozen = frozen_bytes(model, decided)
    on_device = 0 if decided.offload else 1
    buffer = reduce_buffer_bytes(model, decided, cluster)
    moments = [
        _at_loss(model, decided, loss_bytes, buffer),
        *_in_backward(model, decided, buffer),
    ]
    grads, later = gradient_bytes(model, decided, shard_params * on_device)
    if later and decided.replicate == 1:
        moments += _at_end(model, decided, buffer)
    peak = max(moments, key=lambda moment: moment.total)
    return MemoryEstimate(
        peak=peak.name,
        params=(shard_params * PARAM_BYTES + frozen) * on_device,
        frozen=frozen * on_device,
        grads=grads + int(peak.grads),
        outer=shard_params * decided.outer_bytes,
        optimizer=adam_on_device(shard_params, decided),
        gathered=int(peak.gathered),
        buffers=int(peak.buffers),
        activations=int(peak.activations),
        recompute=int(peak.recompute),
        loss=int(peak.loss),
        allocator=(later if decided.replicate > 1 else 0) + pool_bytes(model, cluster, decided),
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


def _at_loss(model: ModelSpec, decided: Decisions, loss_bytes: int | None, buffer: int) -> _Moment:
    """The head's fp32 gradient, and beside it one slice of logits, or the copy of the gradient
    to reduce."""
    width, sizes = DTYPE_BYTES[decided.param_dtype], gathered_sizes(model, decided)
    tokens = decided.tokens
    gathered = _gathered_bytes(model, decided)
    # The last unit stays gathered. The block before it is gathered ahead, after the buffer of the
    # last all-gather was freed. In place that buffer is small, and the peak comes before.
    ahead = 0 if decided.gather_in_place else sizes.block
    buffers = 0 if decided.keeps_gathered else width * (sizes.head + ahead)
    loss = float(_loss_bytes(model, decided) if loss_bytes is None else loss_bytes)
    # The last hidden state, its norm, and their gradients; token ids and labels.
    tail = 5 * width * model.hidden_size + 32
    kept = _kept_bytes(model, decided) + _router_bytes(model, decided)
    # The head's gradient lies in the buffer, which may be larger.
    lies_there = 4 * trained_sizes(model, decided).head
    loss += tokens * tail + WORKSPACE_BYTES + max(0, buffer - lies_there)
    return _Moment("loss", gathered, buffers, tokens * kept, loss)


def _loss_bytes(model: ModelSpec, decided: Decisions) -> int:
    width, head = DTYPE_BYTES[decided.param_dtype], trained_sizes(model, decided).head
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


def _in_backward(model: ModelSpec, decided: Decisions, buffer: int) -> list[_Moment]:
    """Moments at which backward is inside a block: the last one, and the one before it."""
    width, reduce = DTYPE_BYTES[decided.param_dtype], DTYPE_BYTES[decided.reduce_dtype]
    sizes, trained = gathered_sizes(model, decided), trained_sizes(model, decided)
    gathered = _gathered_bytes(model, decided)
    # The block and the one before it are gathered.
    own = width * (0 if decided.keeps_gathered else 2 * sizes.block)
    own += unpacked_bytes(model, decided)
    kept = decided.tokens * (_kept_bytes(model, decided) + _router_bytes(model, decided))
    again, states = _inside_block(model, decided)
    # A tied head stays gathered beside its gradient, until the embedding has its own.
    waiting = width * (sizes.head + trained.head) if model.tied_embeddings else 0
    # The gradients of the head are being reduced first, those of the last block next.
    first, next_one = waiting or reduce * trained.head, waiting + reduce * trained.block
    first, next_one = max(first, buffer), max(next_one, buffer)
    less = kept * (1 - 1 / model.num_layers)
    found = [
        _Moment("backward", gathered, own + weights + reduced, saved, recompute=inside)
        for inside, weights in states
        for reduced, saved in ((first, kept), (next_one, less))
    ]
    if again and not decided.compile and not model.tied_embeddings and trained.head:
        # Without the compiler the head's gradients are still alive when the recomputation starts,
        # and those of the block do not exist yet.
        alive = (8 + 2 * width) * trained.head
        found.append(_Moment("backward", gathered, own + alive, kept, recompute=again))
    return found


def _inside_block(model: ModelSpec, decided: Decisions) -> tuple[float, list[tuple[float, float]]]:
    """What the largest block computes again, and states that its backward may have its peak in:
    bytes of activations and their gradients, and bytes of the gradients of its weights."""
    blocks = shared_bytes(model, decided)
    again = [decided.tokens * recomputed_bytes(block, model, decided) for block in blocks]
    inside = max(a + decided.tokens * b.gradients for a, b in zip(again, blocks, strict=True))
    weights = DTYPE_BYTES[decided.param_dtype] * trained_sizes(model, decided).block
    if not has_lean_experts(model, decided):
        return max(again), [(inside, weights)]
    # Our pass over experts computes the gradients of their weights last, from what is left then.
    left = max(again) + decided.tokens * expert_row_bytes(model, decided)
    return max(again), [(inside, 0.0), (left, weights)]


def _at_end(model: ModelSpec, decided: Decisions, buffer: int) -> list[_Moment]:
    """The end of backward: in the first block, and where the embedding's gradient is reduced."""
    width, reduce = DTYPE_BYTES[decided.param_dtype], DTYPE_BYTES[decided.reduce_dtype]
    sizes, trained = gathered_sizes(model, decided), trained_sizes(model, decided)
    kept = decided.tokens * (_kept_bytes(model, decided) + _router_bytes(model, decided))
    first = kept / model.num_layers
    gathered = _gathered_bytes(model, decided) / model.num_layers
    own = width * (0 if decided.keeps_gathered else sizes.block)
    own += unpacked_bytes(model, decided)
    # A tied table is gathered, and has a gradient since the loss.
    waiting = width * (sizes.table + trained.table) if model.tied_embeddings else 0
    # A rank that is alone keeps its gradients where they are reduced.
    reducing = max(buffer, reduce * trained.block) if num_shards(decided) > 1 else 0
    others = GRAD_BYTES * (trained_share(model, decided) - trained.table / num_shards(decided))
    block = GRAD_BYTES * trained_block_share(model, decided)
    _, states = _inside_block(model, decided)
    last = max(waiting, width * trained.table) + max(buffer, reduce * trained.table)
    in_first_block = [
        _Moment(
            "backward",
            gathered,
            own + weights + waiting + reducing,
            first,
            recompute=inside,
            grads=others - block,
        )
        for inside, weights in states
    ]
    return [*in_first_block, _Moment("backward", gathered, last, first, grads=others)]


def _gathered_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Parameters that stay gathered from forward to backward."""
    if decided.keeps_gathered:
        width = DTYPE_BYTES[decided.param_dtype]
        in_block = 1 if computes_float8(model, decided) and decided.float8_gather else width
        blocks = model.num_layers * gathered_sizes(model, decided).block
        return blocks * in_block + (gathered_total(model, decided) - blocks) * width
    rowwise = decided.float8_rowwise and computes_float8(model, decided)
    if rowwise and decided.checkpoint_activations == "none":
        # Cast weights are kept, one byte each.
        return model.num_layers * block_share(model, decided)
    return 0


def waiting_in_host(model: ModelSpec, decided: Decisions) -> float:
    """Bytes of activations of one micro-batch that a rank has in host memory when backward
    begins."""
    return _share_in_host(model, decided) * decided.tokens * _saved_bytes(model, decided)


def _share_in_host(model: ModelSpec, decided: Decisions) -> float:
    """The share of blocks in host memory, in whole blocks."""
    return len(chosen(model.num_layers, decided.offload_activations)) / model.num_layers


def _kept_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token that stay on the device until backward."""
    blocks, share = model.num_layers, decided.offload_activations
    sent = chosen(blocks, share)
    # The copies of these blocks are not complete when forward ends.
    late = [block for block in sent if block >= blocks - patience(share)]
    return _saved_bytes(model, decided) * (blocks - len(sent) + len(late)) / blocks


def _router_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes for each token that losses of routers save: logits, and in fp32 probabilities for one
    loss and logits for the other."""
    if not (decided.router_aux_loss or decided.router_z_loss):
        return 0
    width = DTYPE_BYTES[decided.param_dtype]
    probabilities = 4 if decided.router_aux_loss else 0
    copies = 4 if decided.router_z_loss and width != 4 else 0
    return model.num_routers * model.num_experts * (width + probabilities + copies)


def _saved_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token that all blocks save for backward."""
    mode, blocks = decided.checkpoint_activations, shared_bytes(model, decided)
    if mode == "none":
        return sum(block.count * block.whole for block in blocks)
    if mode == "selective":
        return sum(block.count * block.selective for block in blocks)
    entry = entry_bytes(model, decided)
    share = num_recomputed(model, decided) / model.num_layers
    return sum(b.count * ((1 - share) * b.whole + share * entry) for b in blocks)
