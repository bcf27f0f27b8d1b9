"""What the blocks of one micro-batch save for backward, and what the largest of them needs then."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.models import ModelSpec
from shardwise.plan.block_memory import (
    SavingBlocks,
    expert_row_bytes,
    has_lean_experts,
    num_recomputed,
    recomputed_bytes,
)
from shardwise.plan.decisions import DTYPE_BYTES, Decisions
from shardwise.plan.host_activations import chosen, patience
from shardwise.plan.shared_blocks import entry_bytes, shared_bytes
from shardwise.plan.unit_sizes import trained_sizes


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch's activations."""

    kept: float
    """Of all blocks, on the device until backward."""

    again: float
    """What the largest block computes again."""

    states: list[tuple[float, float]]
    """States that its backward may have its peak in: bytes of activations and their gradients, and
    bytes of the gradients of its weights."""


def activations_of(model: ModelSpec, decided: Decisions) -> Activations:
    """What blocks save, and what the largest one computes again."""
    blocks, tokens = shared_bytes(model, decided), decided.tokens
    saved = _saved_bytes(blocks, model, decided)
    on_device = _kept_bytes(saved, model, decided)
    kept = tokens * (on_device + _router_bytes(model, decided))
    again = [tokens * recomputed_bytes(block, model, decided) for block in blocks]
    inside = max(a + tokens * b.gradients for a, b in zip(again, blocks, strict=True))
    weights = DTYPE_BYTES[decided.param_dtype] * trained_sizes(model, decided).block
    if not has_lean_experts(model, decided):
        return Activations(kept, max(again), [(inside, weights)])
    # Our pass over experts computes the gradients of their weights last, from what is left then.
    left = max(again) + tokens * expert_row_bytes(model, decided)
    return Activations(kept, max(again), [(inside, 0.0), (left, weights)])


def waiting_in_host(model: ModelSpec, decided: Decisions) -> float:
    """Bytes of activations of one micro-batch that a rank has in host memory when backward
    begins."""
    share = _share_in_host(model, decided)
    if not share:
        return 0.0
    return share * decided.tokens * _saved_bytes(shared_bytes(model, decided), model, decided)


def _share_in_host(model: ModelSpec, decided: Decisions) -> float:
    """The share of blocks in host memory, in whole blocks."""
    return len(chosen(model.num_layers, decided.offload_activations)) / model.num_layers


def _kept_bytes(saved: float, model: ModelSpec, decided: Decisions) -> float:
    """What of the bytes that blocks save for each token stays on the device until backward."""
    blocks, share = model.num_layers, decided.offload_activations
    sent = chosen(blocks, share)
    # The copies of these blocks are not complete when forward ends.
    late = [block for block in sent if block >= blocks - patience(share)]
    return saved * (blocks - len(sent) + len(late)) / blocks


def _router_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes for each token that losses of routers save: logits, and in fp32 probabilities for one
    loss and logits for the other."""
    if not (decided.router_aux_loss or decided.router_z_loss):
        return 0
    width = DTYPE_BYTES[decided.param_dtype]
    probabilities = 4 if decided.router_aux_loss else 0
    copies = 4 if decided.router_z_loss and width != 4 else 0
    return model.num_routers * model.num_experts * (width + probabilities + copies)


def _saved_bytes(blocks: list[SavingBlocks], model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token that all blocks save for backward."""
    mode = decided.checkpoint_activations
    if mode == "none":
        return sum(block.count * block.whole for block in blocks)
    if mode == "selective":
        return sum(block.count * block.selective for block in blocks)
    entry = entry_bytes(model, decided)
    share = num_recomputed(model, decided) / model.num_layers
    return sum(b.count * ((1 - share) * b.whole + share * entry) for b in blocks)
