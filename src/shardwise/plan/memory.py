"""How many bytes one rank needs at the peak of a step: a closed form over the model's shape.

The states (parameters, gradients, Adam) are exact. Activations, buffers and the loss follow what
FSDP2 keeps alive: in forward the unit in use, the one gathered ahead and the buffer it is copied
from; in backward the gathered parameters, the next unit's buffer, the whole gradients and the
previous reduce-scatter's input.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.plan import MemoryEstimate
from shardwise.units import GIB

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Master weights, gradient shards and the two Adam moments are fp32.
PARAM_BYTES, GRAD_BYTES, ADAM_BYTES = 4, 4, 8
# CUDA context and NCCL buffers, which torch's own statistics do not show.
CONTEXT_BYTES = {"cuda": int(1.5 * GIB), "cpu": int(0.3 * GIB)}
# The allocator's private pools per stream and fragmentation, as a share of what moves.
ALLOCATOR_SHARE = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The decisions that memory depends on."""

    shard: int
    keeps_gathered: bool
    param_dtype: str
    reduce_dtype: str
    checkpoint_activations: str | float
    compile: bool
    offload: bool
    micro_batch: int
    seq_len: int
    loss_chunk_tokens: int | None
    accumulates_unsharded: bool


def estimate_memory(model: ModelSpec, cluster: ClusterSpec, layout: Layout) -> MemoryEstimate:
    """Expected peak bytes of one rank."""
    shard_params = -(-model.total_params // layout.shard)
    width = DTYPE_BYTES[layout.param_dtype]
    tokens = layout.micro_batch * layout.seq_len
    on_device = 0 if layout.offload else 1
    gathered = model.total_params * width if layout.keeps_gathered else 0
    unsharded_grads = model.total_params * 4 if layout.accumulates_unsharded else 0
    buffers = _buffer_bytes(model, layout)
    activations = _activation_bytes(model, layout, tokens, width)
    loss = _loss_bytes(model, layout, tokens, width)
    moving = gathered + buffers + activations + loss
    return MemoryEstimate(
        params=shard_params * PARAM_BYTES * on_device,
        grads=shard_params * GRAD_BYTES * on_device + unsharded_grads,
        optimizer=shard_params * ADAM_BYTES * on_device,
        gathered=gathered,
        buffers=buffers,
        activations=activations,
        loss=loss,
        overhead=int(ALLOCATOR_SHARE * moving) + CONTEXT_BYTES[cluster.device],
    )


def _buffer_bytes(model: ModelSpec, layout: Layout) -> int:
    width, reduce_width = DTYPE_BYTES[layout.param_dtype], DTYPE_BYTES[layout.reduce_dtype]
    largest_unit = max(model.block_params, model.embedding_params, model.tail_params)
    return largest_unit * (3 * width + reduce_width)


def _activation_bytes(model: ModelSpec, layout: Layout, tokens: int, width: int) -> int:
    block = _block_activation_bytes(model, layout.compile, width)
    entry = width * model.hidden_size
    # Selective checkpointing keeps matmul results and attention, and recomputes what is cheap.
    kept = width * (3 * model.hidden_size + 2 * _qkv_width(model) + 2 * _ffn_width(model))
    mode = layout.checkpoint_activations
    if mode == "none":
        return tokens * model.num_layers * block
    if mode == "selective":
        return tokens * (model.num_layers * kept + block - kept)
    share = 1.0 if mode == "full" else float(mode)
    recomputed = round(share * model.num_layers)
    return tokens * ((model.num_layers - recomputed) * block + recomputed * entry + block)


def _block_activation_bytes(model: ModelSpec, compiled: bool, width: int) -> int:
    """Bytes per token that one block keeps for backward without checkpointing."""
    ffn_copies, hidden_copies = (3, 4) if compiled else (4, 10)
    linear = hidden_copies * model.hidden_size + 2 * _qkv_width(model)
    return width * (linear + ffn_copies * _ffn_width(model)) + 4 * model.num_heads


def _qkv_width(model: ModelSpec) -> int:
    return model.head_dim * (model.num_heads + model.num_kv_heads)


def _ffn_width(model: ModelSpec) -> int:
    return model.ffn_size * max(1, model.experts_per_token)


def _loss_bytes(model: ModelSpec, layout: Layout, tokens: int, width: int) -> int:
    if layout.loss_chunk_tokens is None:
        return tokens * model.vocab_size * (width + 16)
    chunk = min(tokens, layout.loss_chunk_tokens)
    head_gradient = 4 * model.vocab_size * model.hidden_size
    return (
        chunk * model.vocab_size * (width + 8) + head_gradient + tokens * model.hidden_size * width
    )
