"""Which attention a model is built with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from shardwise.errors import ExitCode, UserError
from shardwise.kernels.attention import causal_attention, has_flash_attention

# The name has no "flash" in it, because transformers would look for a package of that name.
_OURS = "shardwise_causal"


def attention_of(wanted: str, device: str) -> str:
    """The name under which transformers knows the attention.

    transformers' own `flash_attention_4` calls a package without operators, so the compiler would
    break the block's graph there. Ours is an operator.
    """
    if wanted != "flash_attention_4":
        return wanted
    if device == "cuda":
        _check_flash_attention()
    AttentionInterface.register(_OURS, _attend)
    # Masks are built as for `sdpa`: none where attention is plainly causal.
    AttentionMaskInterface.register(_OURS, sdpa_mask)
    return _OURS


def _check_flash_attention() -> None:
    if not has_flash_attention():
        raise UserError(
            "model.attention=flash_attention_4 needs flash-attn-4, which is not installed here",
            fix="pip install 'shardwise[flash4]', or leave model.attention out",
            code=ExitCode.ENVIRONMENT,
        )
    capability = torch.cuda.get_device_capability()
    if capability[0] not in (9, 10):
        raise UserError(
            f"model.attention=flash_attention_4 does not run on {torch.cuda.get_device_name()}",
            why="it was written for Hopper and Blackwell",
            fix="leave model.attention out",
            code=ExitCode.ENVIRONMENT,
        )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: inputs are (sequences, heads, length, width), and
    heads and length are swapped in the result."""
    is_causal = given.get("is_causal", getattr(module, "is_causal", True))
    extras = [name for name in ("softcap", "s_aux", "position_bias") if given.get(name) is not None]
    if attention_mask is not None or dropout > 0 or is_causal is False or extras:
        raise UserError(
            f"flash_attention_4 does not do what {type(module).__name__} needs",
            why="here it is plain causal attention: no window, no dropout, no soft cap, no bias",
            fix="leave model.attention out",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sides = (side.transpose(1, 2) for side in (query, key, value))
    return causal_attention(*sides, scale, given.get("cu_seq_lens_q"))[0], None
