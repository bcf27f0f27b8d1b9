"""What one block saves of a token, and what its backward needs above that: counted from its code,
or computed for the shape of a Llama.

The formulas were fitted to peaks measured on one H200 as rank 0 of 8 to 64 (benchmarks/memory.py
compares them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.facts.block_kind import BlockKind, way_of
from shardwise.facts.flops import recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import (
    DTYPE_BYTES,
    Decisions,
    computes_float8,
    makes_product_again,
    multiplies_experts,
)
from shardwise.plan.scores import saved_scores, scores_in_backward


@dataclass(frozen=True, slots=True)
class SavingBlocks:
    """Blocks that are alike, and bytes for each token of one of them."""

    count: int
    whole: float
    """What it saves without activation checkpointing."""

    selective: float
    """What it saves where only the results of matmuls and attention are saved."""

    gradients: float
    """What its backward needs besides what is saved or recomputed; with the compiler, at its
    peak."""


def block_bytes(model: ModelSpec, decided: Decisions) -> list[SavingBlocks]:
    """All blocks, by what they save."""
    if not model.kinds:
        whole, selective = _whole_bytes(model, decided), _selective_bytes(model, decided)
        blocks = SavingBlocks(model.num_layers, whole, selective, _gradient_bytes(model, decided))
        return [_with_scores(blocks, model, decided)]
    return [
        _with_scores(_counted(kind, model, decided), model, decided, kind) for kind in model.kinds
    ]


def recomputed_bytes(blocks: SavingBlocks, model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token that the recomputation of one block creates."""
    created = {"none": 0.0, "selective": blocks.whole - blocks.selective, "full": blocks.whole}
    return created[_recompute(model, decided)]


def num_recomputed(model: ModelSpec, decided: Decisions) -> int:
    """Blocks that run again as a whole."""
    return round(recomputed_share(decided.checkpoint_activations) * model.num_layers)


def _recompute(model: ModelSpec, decided: Decisions) -> str:
    """How the blocks run whose backward needs most."""
    if decided.checkpoint_activations == "selective":
        return "selective"
    return "full" if num_recomputed(model, decided) else "none"


def _counted(kind: BlockKind, model: ModelSpec, decided: Decisions) -> SavingBlocks:
    float8 = computes_float8(model, decided)
    whole_way, selective_way, way = (
        way_of(
            compiled=decided.compile,
            own_kernels=decided.own_kernels and not float8,
            recompute=mode,
        )
        for mode in ("none", "selective", _recompute(model, decided))
    )
    width = DTYPE_BYTES[decided.param_dtype]
    scored = decided.seq_len if decided.attention == "eager" else 0
    whole, selective = (kind.saved[way].bytes(width, scored) for way in (whole_way, selective_way))
    if float8:
        whole = selective + _float8_inputs(model, decided)
    blocks = SavingBlocks(kind.count, whole, selective, _gradient_bytes(model, decided))
    # Without the compiler, backward runs after the recomputation as it does without one.
    inside = kind.saved.get(way if decided.compile else whole_way)
    if inside is None or inside.backward_bytes is None or float8:
        return blocks
    again = recomputed_bytes(blocks, model, decided) if decided.compile else 0.0
    return replace(blocks, gradients=inside.backward_bytes * width / 2 - again)


def _with_scores(
    blocks: SavingBlocks, model: ModelSpec, decided: Decisions, kind: BlockKind | None = None
) -> SavingBlocks:
    whole, selective = (
        saved_scores(model, decided, selective=is_selective, kind=kind)
        for is_selective in (False, True)
    )
    gradients = max(blocks.gradients, scores_in_backward(model, decided, kind))
    return SavingBlocks(blocks.count, blocks.whole + whole, blocks.selective + selective, gradients)


def _gradient_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes of a token's gradients that exist at once, with the compiler."""
    if not decided.compile:
        return 0
    width, ffn = DTYPE_BYTES[decided.param_dtype], ffn_width(model)
    if computes_float8(model, decided):
        return 7 * ffn  # one gradient in bf16 and five float8 copies
    if has_lean_experts(model, decided):
        # The gradients of SwiGLU's product and halves, and the product itself.
        return width * 4 * ffn + expert_row_bytes(model, decided)
    return width * 3 * ffn


def _whole_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token that one block saves without activation checkpointing."""
    width, statistics = DTYPE_BYTES[decided.param_dtype], 4 * model.num_heads + 8
    if computes_float8(model, decided):
        return _selective_bytes(model, decided) + _float8_inputs(model, decided)
    hidden, ffn = (4, 3) if decided.compile else (9, 4)
    if makes_product_again(model, decided) or has_lean_experts(model, decided):
        ffn = 2
    if not has_lean_experts(model, decided):
        # What goes into the experts and what comes out, once for each of a token's experts.
        hidden += 2 * _num_routed(model)
    channels = hidden * model.hidden_size + 2 * _qkv_width(model) + ffn * ffn_width(model)
    # Queries and keys before their norms; without the compiler their fp32 copies too.
    norms = (1.0 if decided.compile else 2.25) * _qkv_width(model) * model.head_norms
    return width * (channels + norms) + statistics


def _selective_bytes(model: ModelSpec, decided: Decisions) -> float:
    """The same where only the results of matmuls and attention are saved."""
    width = DTYPE_BYTES[decided.param_dtype]
    hidden = 2 if decided.compile else 4
    if not has_lean_experts(model, decided):
        hidden += _num_routed(model)
    # The product of our SwiGLU is an output of the operator that also computes the second half.
    # Without the compiler torch saves all outputs of an operator.
    ffn = 3 if makes_product_again(model, decided) and not decided.compile else 2
    channels = hidden * model.hidden_size + 2 * _qkv_width(model) + ffn * ffn_width(model)
    return width * channels + 4 * model.num_heads


def _float8_inputs(model: ModelSpec, decided: Decisions) -> int:
    """Bytes of the inputs of linear layers that are saved in float8; torchao's own layers recompute
    them."""
    return 0 if decided.float8_rowwise else 3 * model.hidden_size


def _qkv_width(model: ModelSpec) -> int:
    return model.head_dim * (model.num_heads + model.num_kv_heads)


def _num_routed(model: ModelSpec) -> int:
    """Experts of a token; 0 where there is one MLP for all."""
    return model.experts_per_token if model.num_experts > 1 else 0


def has_lean_experts(model: ModelSpec, decided: Decisions) -> bool:
    """Whether our own pass over experts saves the halves of SwiGLU alone."""
    is_lean = decided.own_kernels and decided.param_dtype == "bf16"
    return _num_routed(model) > 0 and (is_lean or multiplies_experts(decided))


def expert_row_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes of a token's rows that go in and out of experts in backward, and of its gradient."""
    rows = 2 * _num_routed(model) + 1
    return DTYPE_BYTES[decided.param_dtype] * rows * model.hidden_size


def ffn_width(model: ModelSpec) -> int:
    """Channels of the MLP that a token goes through, or of all its experts."""
    return model.ffn_size * max(1, model.experts_per_token)
