"""Which earlier tokens a token sees, said in a few numbers and not as a matrix of all pairs.

transformers asks for a mask once for each kind of block and forward, and hands it to the blocks as
it is. Ours says "all" or "the last N tokens". Only what is neither is drawn, in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import flex_attention_mask

# Tokens of one side of a tile.
_TILE = 128


@dataclass(frozen=True)
class Mask:
    """What a token sees of the tokens before it."""

    window: int | None
    """The number of tokens, itself among them; None: all."""

    tiles: BlockMask | None = None
    """The same as FlexAttention reads it."""

    only_tiles: bool = False
    """Whether `tiles` alone says it, because documents or chunks cut it further."""

    @property
    def is_causal(self) -> bool:
        """Whether every token sees all tokens before it."""
        return self.window is None and not self.only_tiles


def described_mask(**asked: Any) -> Mask:
    """The mask that transformers asks for, without tiles."""
    window, is_described = _window(**asked)
    return Mask(window, only_tiles=not is_described)


def tiled_mask(**asked: Any) -> Mask:
    """The same with tiles."""
    window, is_described = _window(**asked)
    if not is_described:
        return Mask(None, flex_attention_mask(**asked), only_tiles=True)
    return Mask(window, _tiles(asked["kv_length"], window, asked["device"]))


def _window(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_: Any,
) -> tuple[int | None, bool]:
    """The window, and whether that is all of the mask.

    `allow_is_causal_skip` is false where something was added to the plain form. `local_size` is the
    size of a window or of a chunk, and a chunk is no window.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    is_plain = allow_is_causal_skip and attention_mask is None and q_length == kv_length
    if local_size is None or local_size >= kv_length:
        return None, is_plain
    return local_size, is_plain and local_size != chunk


def _tiles(length: int, window: int | None, device: torch.device | str) -> BlockMask:
    """Tiles of the causal triangle, or of the band that a window leaves of it.

    torch's own function for this compares all pairs of tokens.
    """
    first = torch.arange(0, length, _TILE, device=device)
    query, key = first[:, None], first[None]
    last = _TILE - 1
    is_seen, is_full = key <= query, key < query
    if window is not None:
        is_seen = is_seen & (key + last > query - window)
        is_full = is_full & (key > query + last - window)
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=_TILE,
        mask_mod=_sees(window),
        seq_lengths=(length, length),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row, and their columns, for all sequences and heads."""
    columns = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


def _sees(window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if window is None:
        return lambda sequence, head, query, key: key <= query
    return lambda sequence, head, query, key: (key <= query) & (key > query - window)
