"""The scores of `eager` attention, which exist in memory because no kernel computes with them."""

from __future__ import annotations

from shardwise.facts.block_kind import BlockKind
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import DTYPE_BYTES, Decisions

_FP32 = 4  # bytes of an element of the softmax, which transformers computes in fp32


def saved_scores(
    model: ModelSpec, decided: Decisions, *, selective: bool, kind: BlockKind | None = None
) -> float:
    """Bytes for each token that one block saves of its scores; `kind` is of a counted block.

    The softmax and its copy in the model's format are saved. The compiler keeps two copies in the
    model's format instead, and `selective` checkpointing one, the input of a matmul.
    """
    if decided.attention != "eager" or (kind and any(s.scores for s in kind.saved.values())):
        return 0.0  # what was counted with scores has them already
    width = DTYPE_BYTES[decided.param_dtype]
    copies = 2 * width if decided.compile else width + _FP32
    return decided.seq_len * _heads(model, kind) * (width if selective else copies)


def scores_in_backward(
    model: ModelSpec, decided: Decisions, kind: BlockKind | None = None
) -> float:
    """Bytes for each token that the gradients of one block's scores take, before and after the
    softmax."""
    if decided.attention != "eager":
        return 0.0
    width = DTYPE_BYTES[decided.param_dtype] if decided.compile else _FP32
    return 2.0 * width * decided.seq_len * _heads(model, kind)


def _heads(model: ModelSpec, kind: BlockKind | None) -> int:
    """A block's heads; none where it mixes tokens in another way."""
    return sum(each.heads for each in kind.work.attentions) if kind else model.num_heads
