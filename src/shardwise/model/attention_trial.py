"""Whether a family runs with an attention of ours, tried on meta before ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.errors import UserError, brief
from shardwise.internals.hugging_face import unsearched_positions
from shardwise.model.attention_choice import checked_mask
from shardwise.model.build import build_on_meta
from shardwise.model.masks import Mask, described_mask

_TRIED = "shardwise_tried"
# Tokens of a trial that no window depends on.
_FEW = 64
# What a family's code raises where it does not know the attention, or meets a mask that is no
# tensor.
CANNOT_RUN = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError),
    *(TypeError, ValueError, UserError),
)


def validate_attention(
    wanted: str, hf_config: Mapping[str, Any], seq_len: int, *, code_dir: str | None = None
) -> None:
    """Raise where the family's own code reads the masks of `wanted`, or needs more than it does.

    Our masks are no tensors, so code that reads one fails, and does not fail with its own masks.
    """
    AttentionInterface.register(_TRIED, _attend_as(wanted, []))
    AttentionMaskInterface.register(_TRIED, described_mask)
    failure = _failure(hf_config, _TRIED, seq_len, code_dir)
    if failure is None or _failure(hf_config, "eager", seq_len, code_dir) is not None:
        return
    raise UserError(
        f"{hf_config.get('model_type')} models do not run with model.attention={wanted}",
        why="their code in transformers reads attention masks itself, and those of "
        f"{wanted} are no tensors ({brief(failure)})",
        fix="leave model.attention out, or write model.attention=eager",
    ) from failure


def runs_with_ours(hf_config: Mapping[str, Any], *, code_dir: str | None = None) -> bool:
    """Whether the family's code calls a registered attention, and asks for nothing that
    FlashAttention 4 does not do."""
    called: list[nn.Module] = []
    AttentionInterface.register(_TRIED, _attend_as("flash_attention_4", called))
    AttentionMaskInterface.register(_TRIED, described_mask)
    try:
        _run_on_meta(hf_config, _TRIED, _FEW, code_dir)
    except CANNOT_RUN:
        return False
    return bool(called)


def _attend_as(wanted: str, called: list[nn.Module]) -> Any:
    """An attention that refuses what `wanted` refuses, computes nothing, and notes who calls it."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None,
        dropout: float = 0.0,
        **given: Any,
    ) -> tuple[Tensor, None]:
        checked_mask(wanted, module, attention_mask, dropout, given)
        called.append(module)
        sequences, heads, length, _ = query.shape
        return query.new_empty(sequences, length, heads, value.shape[-1]), None

    return attend


def _failure(
    hf_config: Mapping[str, Any], attention: str, seq_len: int, code_dir: str | None
) -> AttributeError | TypeError | None:
    """The error that a wrong type ends in. Others say that values are missing on meta."""
    try:
        _run_on_meta(hf_config, attention, seq_len, code_dir)
    except (AttributeError, TypeError) as error:
        return error
    except (AssertionError, LookupError, RuntimeError, ValueError):
        # Ranks try the model with values.
        return None
    return None


def _run_on_meta(
    hf_config: Mapping[str, Any], attention: str, seq_len: int, code_dir: str | None
) -> None:
    model = build_on_meta(hf_config, attention=attention, code_dir=code_dir)
    # Grouped matmuls on meta take bf16 alone.
    nn.Module.to(model, dtype=torch.bfloat16)
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    with torch.no_grad(), unsearched_positions():
        model(input_ids=tokens, use_cache=False)
