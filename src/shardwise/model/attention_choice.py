"""Which attention a model is built with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.errors import ExitCode, UserError
from shardwise.facts.installed import has_flash_attention
from shardwise.kernels.attention import causal_attention
from shardwise.model.masks import Mask, described_mask, tiled_mask

# No name has "flash" in it, because transformers would look for a package of that name.
_OURS = "shardwise_causal"
_TILED = "shardwise_tiled"


def attention_of(wanted: str, device: str) -> str:
    """The name under which transformers knows the attention.

    transformers' own `flash_attention_4` calls a package without operators, so the compiler would
    break the block's graph there. Ours is an operator. Its `flex_attention` computes plain causal
    blocks too, for which torch has faster kernels, and compares all pairs of tokens for a window.
    """
    if wanted == "flash_attention_4":
        if device == "cuda":
            validate_flash_attention()
        AttentionInterface.register(_OURS, _attend)
        AttentionMaskInterface.register(_OURS, described_mask)
        return _OURS
    if wanted == "flex_attention":
        AttentionInterface.register(_TILED, _attend_in_tiles)
        AttentionMaskInterface.register(_TILED, tiled_mask)
        return _TILED
    return wanted


def validate_flash_attention() -> None:
    """Raise where FlashAttention 4 does not run on this GPU."""
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


# transformers calls attention with tensors of (sequences, heads, length, width), and takes the
# result with heads and length swapped.


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention by our operator: FlashAttention 4 on a GPU."""
    mask = checked_mask("flash_attention_4", module, attention_mask, dropout, given)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sides = (side.transpose(1, 2) for side in (query, key, value))
    starts, softcap, sinks = (given.get(name) for name in ("cu_seq_lens_q", "softcap", "s_aux"))
    return causal_attention(*sides, scale, starts, mask.window, softcap, sinks)[0], None


def _attend_in_tiles(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """FlexAttention for windows, soft caps and sinks; elsewhere torch's fastest kernel."""
    mask = checked_mask("flex_attention", module, attention_mask, dropout, given)
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    if mask.is_causal and softcap is None and sinks is None:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    if mask.tiles is None:
        raise _refusal(
            "flex_attention", module, "a soft cap or sinks, and is called without a mask"
        )

    out = in_tiles(query, key, value, mask.tiles, scaling, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2), None


def in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: BlockMask,
    scaling: float | None,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """FlexAttention, which computes the tiles of a mask that are seen."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out, found = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=tiles,
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if sinks is None:
        return cast(Tensor, out)
    # A sink takes its share of the weights, and gives nothing for it.
    kept = torch.sigmoid(found.lse - sinks.float()[:, None])
    return cast(Tensor, (out * kept[..., None]).to(query.dtype))


def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _compiled_flex() -> Any:
    """Outside of a compiled block: as it is, it would compute all pairs of tokens."""
    return torch.compile(flex_attention, dynamic=False)


def checked_mask(
    name: str, module: nn.Module, mask: Mask | None, dropout: float, given: dict[str, Any]
) -> Mask:
    """The mask; raises where the module wants more than a mask, a cap and sinks."""
    mask = Mask(None) if mask is None else mask
    is_causal = given.get("is_causal", getattr(module, "is_causal", True))
    if dropout > 0:
        raise _refusal(name, module, "dropout")
    if is_causal is False:
        raise _refusal(name, module, "attention to later tokens")
    if given.get("position_bias") is not None:
        raise _refusal(name, module, "a bias by position")
    if name == "flash_attention_4" and mask.only_tiles:
        raise _refusal(name, module, "chunks of a sequence, or documents by position")
    return mask


def _refusal(name: str, module: nn.Module, what: str) -> UserError:
    return UserError(
        f"{name} does not do what {type(module).__name__} needs",
        why=f"it needs {what}",
        fix="write model.attention=sdpa, or model.attention=eager where the family has no sdpa",
    )
