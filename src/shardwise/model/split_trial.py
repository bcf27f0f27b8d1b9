"""Whether ranks can divide a family's sequences, tried on meta before ranks start.

Attention must be the only place where tokens meet. So each block has to call the attention that is
registered, with the mask and the arguments as they are, and may have no other layer that looks
along the sequence. What this cannot see, such as positions that a family counts by itself, shows in
the losses that are compared before the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from shardwise.errors import UserError, brief
from shardwise.model.attention_trial import CANNOT_RUN
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.build import build_on_meta
from shardwise.model.masks import Mask, part_mask
from shardwise.model.sequence_split import SequenceSplit
from shardwise.model.split_attention import PART, part_arguments, validate_call

_TRIED = "shardwise_tried_split"
# Tokens of the whole sequences of a trial, and the ranks that divide them.
_LENGTH, _RANKS = 64, 2
# Layers that mix neighbours: in state space models, and beside attention in some others.
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.RNNBase)


def validate_split(
    wanted: str, hf_config: Mapping[str, Any], *, code_dir: str | None = None
) -> None:
    """Raise with the reason where ranks cannot divide this family's sequences."""
    reason = why_not_split(wanted, hf_config, code_dir=code_dir)
    if reason is not None:
        raise UserError(
            f"ranks cannot divide the sequences of {hf_config.get('model_type')} models",
            why=reason,
            fix="write mesh.context=1",
        )


def why_not_split(
    wanted: str, hf_config: Mapping[str, Any], *, code_dir: str | None = None
) -> str | None:
    """None where they can."""
    called: list[nn.Module] = []
    AttentionInterface.register(_TRIED, _attend_as(wanted, called))
    AttentionMaskInterface.register(_TRIED, part_mask)
    try:
        model = build_on_meta(hf_config, attention=_TRIED, code_dir=code_dir)
    except UserError as error:
        return error.why
    # Grouped matmuls on meta take bf16 alone.
    nn.Module.to(model, dtype=torch.bfloat16)
    blocks = [block for unit in find_units(model).blocks for block in iter_modules(model, unit)]
    # A model that also sees images has blocks that do not run here.
    begun: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, inputs: begun.append(module))
    failed = _failure(model)
    return _what_else_mixes(begun or blocks) or failed or _what_is_silent(begun, called)


class _NotHandedOn(Exception):
    """Attention was called without what it needs to know of the sequence."""


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
        validate_call(wanted, module, attention_mask, dropout, given)
        if PART not in given:
            raise _NotHandedOn
        called.append(module)
        sequences, heads, length, _ = query.shape
        return query.new_empty(sequences, length, heads, value.shape[-1]), None

    return attend


def _failure(model: PreTrainedModel) -> str | None:
    """Why a forward over the first rank's part of a sequence fails."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "their forward takes no positions"
    tokens = torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
    split = SequenceSplit(0, _RANKS, "")
    more = part_arguments(split, tokens)
    try:
        with torch.no_grad():
            model(input_ids=split.own(tokens), use_cache=False, **more)
    except _NotHandedOn:
        return "their code does not hand the arguments of a forward on to attention"
    except UserError as error:
        return error.why
    except CANNOT_RUN as error:
        return f"their code does more with attention than hand it on ({brief(error)})"
    return None


def _what_else_mixes(blocks: list[nn.Module]) -> str | None:
    """A layer beside attention that looks along the sequence."""
    for block in blocks:
        for module in block.modules():
            if isinstance(module, _MIXERS):
                return f"their {type(block).__name__} has a {type(module).__name__} over tokens"
    return None


def _what_is_silent(blocks: list[nn.Module], called: list[nn.Module]) -> str | None:
    """A block that has not called the attention that is registered."""
    for block in blocks:
        if set(block.modules()).isdisjoint(called):
            return f"their {type(block).__name__} has attention of its own, or none"
    return None
