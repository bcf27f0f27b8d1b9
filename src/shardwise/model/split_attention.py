"""Attention where ranks divide sequences: of this rank's tokens, over all that they see.

Every kernel computes the same thing here: the tokens of one chunk against the tokens up to the
chunk's end. So the mask is aligned at the end of both, and needs no matrix where it is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.errors import UserError
from shardwise.internals.hugging_face import spelled_out_attention
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.hopper import on_hopper
from shardwise.kernels.last_tokens import last_tokens_attention, takes
from shardwise.model.attention_choice import in_tiles, validate_flash_attention
from shardwise.model.masks import Mask, Sight, pairs_of, part_mask, tiles_of
from shardwise.model.sequence_split import SequencePart, SequenceSplit

PART = "sequence_part"
"""The argument of a model's forward that says which part of each sequence it is given. Without it
sequences are whole."""


def part_arguments(
    split: SequenceSplit, ids: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
) -> dict[str, Any]:
    """What a model is given besides this rank's tokens of the sequences `ids`, whose documents have
    `positions` and `starts`.

    The mask hides nothing. transformers looks for documents in positions where none is given, and
    would take the step from one chunk to the other for the end of one.
    """
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    own = split.own(positions)
    part = SequencePart(split, ids.shape[1], starts)
    return {"position_ids": own, "attention_mask": torch.ones_like(own), PART: part}


@dataclass(frozen=True)
class Call:
    """One chunk's attention: what a kernel needs besides queries, keys and values."""

    module: nn.Module
    sight: Sight
    length: int
    """The tokens of a whole sequence."""

    window: int | None
    starts: Tensor | None
    """Where documents begin in whole sequences, as in `Documents.starts`."""

    scale: float | None
    given: dict[str, Any]
    """What else the family hands to attention."""

    @property
    def is_plain(self) -> bool:
        """Whether every token sees all tokens before it."""
        return self.window is None and self.starts is None

    @property
    def softcap(self) -> float | None:
        """The bound of scores."""
        return self.given.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """One more score for each head, whose weight goes to no token."""
        return self.given.get("s_aux")

    def documents(self, sequences: int) -> Tensor | None:
        """The number of each token's document in whole sequences."""
        if self.starts is None:
            return None
        size = sequences * self.length
        tokens = torch.arange(size, dtype=self.starts.dtype, device=self.starts.device)
        return torch.searchsorted(self.starts, tokens, right=True).view(sequences, self.length)

    def pairs(self, query: Tensor) -> Tensor:
        """Which token sees which one."""
        return pairs_of(self.sight, self.window, self.documents(len(query)), query.device)

    def starts_of(self, begin: int) -> Tensor | None:
        """Where documents begin among the tokens from `begin` to the end of the sight.

        Documents that have none of them are empty there.
        """
        if self.starts is None:
            return None
        row, place = self.starts // self.length, self.starts % self.length
        stop = self.sight.stop
        return (row * (stop - begin) + place.clamp(begin, stop) - begin).to(torch.int32)


Kernel = Callable[[Call, Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values as (sequences, heads, tokens, width), and returns the result with
heads and tokens swapped."""


def split_attention_of(wanted: str, device: str) -> str:
    """The name under which transformers knows `wanted` for divided sequences."""
    if wanted == "flash_attention_4" and device == "cuda":
        validate_flash_attention()
    # No name has "flash" in it, because transformers would look for a package of that name.
    name = f"shardwise_split_{wanted.removeprefix('flash_')}"
    has_cudnn = wanted == "sdpa" and device == "cuda" and on_hopper()
    AttentionInterface.register(name, attention_with(wanted, in_parts if has_cudnn else None))
    AttentionMaskInterface.register(name, part_mask)
    return name


def attention_with(
    wanted: str, given_kernel: Kernel | None = None
) -> Callable[..., tuple[Tensor, None]]:
    """What transformers calls. All ranks that divide a sequence call it together."""
    kernel = given_kernel or KERNELS[wanted]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        mask = validate_call(wanted, module, attention_mask, dropout, given)
        part: SequencePart | None = given.pop(PART, None)
        length = query.shape[2] if part is None else part.length
        starts = given.get("cu_seq_lens_q") if part is None else part.starts
        window = None if mask.window is None or mask.window >= length else mask.window
        seen = [(Sight(0, 0, length), key, value)]
        if part is not None:
            seen = part.seen_chunks(key, value, window)
        outs = [
            kernel(Call(module, sight, length, window, starts, scaling, given), own, *sides)
            for own, (sight, *sides) in zip(query.chunk(len(seen), 2), seen, strict=True)
        ]
        return torch.cat(outs, 1), None

    return attend


def validate_call(
    wanted: str, module: nn.Module, mask: Mask | None, dropout: float, given: dict[str, Any]
) -> Mask:
    """The mask; raises where the module wants what is not done for divided sequences."""
    mask = Mask(None) if mask is None else mask
    is_causal = given.get("is_causal", getattr(module, "is_causal", True))
    needs_more = given.get("softcap") is not None or given.get("s_aux") is not None
    if dropout > 0:
        raise _refusal(module, "dropout in attention")
    if is_causal is False:
        raise _refusal(module, "attention to later tokens")
    if given.get("position_bias") is not None:
        raise _refusal(module, "a bias by position")
    if mask.only_tiles:
        raise _refusal(module, "chunks of a sequence, or a mask of its own")
    if wanted == "sdpa" and needs_more:
        raise _refusal(module, "a soft cap or sinks, which sdpa does not have")
    if wanted == "eager" and spelled_out_attention(module) is None:
        raise _refusal(module, "an eager attention that its own forward spells out")
    return mask


def _refusal(module: nn.Module, what: str) -> UserError:
    return UserError(
        f"ranks cannot divide the sequences of {type(module).__name__}",
        why=f"it needs {what}",
        fix="write mesh.context=1",
    )


# ---- kernels ----------------------------------------------------------------------------------


def _by_torch(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's fastest kernel. A mask costs a look at all pairs of tokens, so it is the last
    choice."""
    how: dict[str, Any] = {"scale": call.scale, "enable_gqa": True}
    if call.is_plain and query.shape[2] == key.shape[2]:
        how["is_causal"] = query.shape[2] > 1
    elif call.is_plain and query.is_cuda:
        how["attn_mask"] = causal_lower_right(query.shape[2], key.shape[2])
    else:
        # With a mask torch has no fast kernel for heads that share keys.
        groups = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
        how |= {"attn_mask": call.pairs(query), "enable_gqa": False}
    return scaled_dot_product_attention(query, key, value, **how).transpose(1, 2)


def in_parts(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same where cuDNN's kernels are the fastest. torch takes them for no mask that ends with
    the keys."""
    if not call.is_plain or query.shape[2] == key.shape[2] or not takes(query, value):
        return _by_torch(call, query, key, value)
    sides = (side.transpose(1, 2) for side in (query, key, value))
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    return last_tokens_attention(*sides, scale)[0]


def _by_family(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The family's own code, with a mask that is added to the scores."""
    attend = spelled_out_attention(call.module)
    if attend is None:
        raise AssertionError("the call was validated")
    hidden = ~call.pairs(query)
    least = torch.finfo(query.dtype).min
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill(hidden, least)
    out: Tensor
    out, *_ = attend(call.module, query, key, value, bias, scaling=call.scale, **call.given)
    return out


def _by_tiles(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlexAttention."""
    tiles = tiles_of(call.sight, call.window, call.documents(len(query)), query.device)
    caps: dict[str, Any] = {"softcap": call.softcap, "sinks": call.sinks}
    return in_tiles(query, key, value, tiles, call.scale, **caps).transpose(1, 2)


def _by_operator(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention 4 on a GPU."""
    out, _ = causal_attention(
        *(side.transpose(1, 2) for side in (query, key, value)),
        query.shape[-1] ** -0.5 if call.scale is None else call.scale,
        call.starts_of(call.sight.first),
        call.window,
        call.softcap,
        call.sinks,
        call.starts_of(call.sight.begin),
    )
    return out


KERNELS: dict[str, Kernel] = {
    "sdpa": _by_torch,
    "eager": _by_family,
    "flex_attention": _by_tiles,
    "flash_attention_4": _by_operator,
}
