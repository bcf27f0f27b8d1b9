"""Masks that keep packed documents apart, for families that build theirs without positions.

Most families hand positions to transformers' masks, which find documents in them. gpt-oss does
not, but takes masks that are ready.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

from shardwise.model.override import override_forward


def give_masks(model: nn.Module, dtype: torch.dtype) -> bool:
    """Let the blocks of a model get masks that are made from positions, and return whether it is a
    model of transformers, for which there are any. `dtype` is computed with."""
    base = getattr(model, "base_model", None)
    if base is None or not isinstance(getattr(base, "config", None), PreTrainedConfig):
        return False

    def make_forward(cls: type[nn.Module]) -> Callable[..., Any]:
        def forward(
            self: Any,
            *args: Any,
            position_ids: Tensor | None = None,
            attention_mask: Any = None,
            **kwargs: Any,
        ) -> Any:
            if attention_mask is None and position_ids is not None:
                attention_mask = masks_of(self.config, position_ids, dtype)
            given = {"position_ids": position_ids, "attention_mask": attention_mask}
            return cls.forward(self, *args, **given, **kwargs)

        return forward

    override_forward([base], "Documents", make_forward)
    return True


def masks_of(config: PreTrainedConfig, positions: Tensor, dtype: torch.dtype) -> Any:
    """A mask for each kind of block, or one for all, by positions that begin anew."""
    # Of embeddings only their sizes, dtype and device are read.
    like = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    known: dict[str, Any] = {
        "config": config,
        **dict.fromkeys(("inputs_embeds", "input_embeds"), like),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
        "cache_position": torch.arange(positions.shape[1], device=positions.device),
    }
    # Releases of transformers differ in these names.
    names = inspect.signature(create_masks_for_generate).parameters
    return create_masks_for_generate(**{name: known[name] for name in names if name in known})
