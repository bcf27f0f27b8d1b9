"""What a rank saves of a block that it computes together with others.

Along the tensor axis ranks divide heads and channels, and with sequence parallelism the tokens of
norms and of the residual. What goes into attention and into the MLP is gathered, and saved whole.
Along the context axis each rank has its own tokens, and the keys and values of all. Where experts
are dealt out, rows that have travelled are saved, and no more of what is made of them than the two
halves of SwiGLU.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.facts.block_kind import BlockKind
from shardwise.facts.block_work import Attention
from shardwise.facts.models import ModelSpec
from shardwise.plan.block_memory import (
    SavingBlocks,
    block_bytes,
    ffn_width,
    has_lean_experts,
)
from shardwise.plan.decisions import DTYPE_BYTES, Decisions

# Vectors of the hidden size that norms and the residual save for each token, compiled and not.
_NORM_VECTORS = {True: 4, False: 9}
# Gathered inputs of a block: attention's and the MLP's.
_GATHERED = 2
# Vectors of the hidden size that a compiled block saves besides, because its graph is cut where
# rows leave and where they come back.
_CUT_VECTORS = 2
# Matmuls whose results are parts of a sum over ranks, and so are as wide on each as on one.
_SUMMED = 2


def shared_bytes(model: ModelSpec, decided: Decisions) -> list[SavingBlocks]:
    """All blocks, by what one rank saves of each token that its group works on."""
    blocks = block_bytes(model, decided)
    kinds: list[BlockKind | None] = [*model.kinds] or [None]
    if decided.expert > 1:
        blocks = [_dealt(b, kind, model, decided) for b, kind in zip(blocks, kinds, strict=True)]
    if decided.context > 1:
        blocks = [_seeing(b, kind, model, decided) for b, kind in zip(blocks, kinds, strict=True)]
    return blocks if decided.tensor == 1 else [_part(each, model, decided) for each in blocks]


def entry_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token of a block's input, which is what full recompute saves."""
    ranks = decided.tensor if decided.sequence_parallel else 1
    return DTYPE_BYTES[decided.param_dtype] * model.hidden_size / ranks


def _dealt(
    block: SavingBlocks, kind: BlockKind | None, model: ModelSpec, decided: Decisions
) -> SavingBlocks:
    """A block whose experts lie on other ranks."""
    if model.num_experts == 1 or (kind and not any(each.groups > 1 for each in kind.work.matmuls)):
        return block
    width = DTYPE_BYTES[decided.param_dtype]
    rows = width * model.experts_per_token * model.hidden_size
    cut = _CUT_VECTORS * width * model.hidden_size if decided.compile else 0
    if has_lean_experts(model, decided):
        # Selective recompute keeps what has travelled.
        return replace(block, whole=block.whole + rows + cut, selective=block.selective + rows)
    # What goes into the last matmul and what comes out of it is not saved here, nor are the
    # activation and the product of SwiGLU, of which the compiler saves one in any case.
    unsaved = 1 if decided.compile else 2
    whole = block.whole - rows - width * unsaved * ffn_width(model) + cut
    return replace(block, whole=whole)


def _seeing(
    block: SavingBlocks, kind: BlockKind | None, model: ModelSpec, decided: Decisions
) -> SavingBlocks:
    """A block whose attention sees the tokens of other ranks. Selective recompute gathers their
    keys and values again."""
    attentions = _attentions(model) if kind is None else kind.work.attentions
    channels = sum(_seen_channels(each, decided) for each in attentions)
    return replace(block, whole=block.whole + DTYPE_BYTES[decided.param_dtype] * channels)


def _seen_channels(attention: Attention, decided: Decisions) -> float:
    """Keys and values of others for each token of this rank, and the results of both chunks, which
    are saved beside what they are joined to."""
    own = attention.kv_heads * (attention.key_width + attention.value_width)
    chunk, window = decided.seq_len // (2 * decided.context), attention.window
    tokens = decided.context
    seen = tokens if window is None or window - 1 > chunk else 1 + (window - 1) / chunk
    return own * (seen - 1) + attention.heads * attention.value_width


def _attentions(model: ModelSpec) -> tuple[Attention, ...]:
    width = model.head_dim
    window = model.attention_window
    heads = {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "window": window}
    return (Attention(key_width=width, value_width=width, **heads),)  # type: ignore[arg-type]


def _part(block: SavingBlocks, model: ModelSpec, decided: Decisions) -> SavingBlocks:
    ranks, hidden = decided.tensor, DTYPE_BYTES[decided.param_dtype] * model.hidden_size
    undivided = _GATHERED if decided.sequence_parallel else _NORM_VECTORS[decided.compile]
    elsewhere = hidden * (1 - 1 / ranks)
    return replace(
        block,
        whole=block.whole / ranks + undivided * elsewhere,
        selective=block.selective / ranks + _sums(decided) * hidden,
        gradients=block.gradients / ranks + _GATHERED * elsewhere,
    )


def _sums(decided: Decisions) -> float:
    """Vectors of the hidden size that selective recompute saves for each token besides: without the
    compiler both the parts of sums and one sum, each as large as it is on a rank."""
    if decided.compile:
        return 0.0
    share = 1 / decided.tensor
    if decided.sequence_parallel:
        return _SUMMED * (1 - share) + share
    return 5 - 4 * share  # the input, two parts and two sums
