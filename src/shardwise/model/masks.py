"""Which earlier tokens a token sees, said in a few numbers and not as a matrix of all pairs.

transformers asks for a mask once for each kind of block and forward, and hands it to the blocks as
it is. Ours says "all" or "the last N tokens". Only what is neither is drawn, in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import flex_attention_mask

# Tokens of one side of a tile.
_TILE = 128


class Sight(NamedTuple):
    """Tokens that attention is computed for, and the earlier ones that they may see, by their
    places in a sequence."""

    begin: int
    """The first token that is seen."""

    first: int
    """The first token that attention is computed for."""

    stop: int
    """The end of both."""


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


def part_mask(**asked: Any) -> Mask:
    """The mask of a part of each sequence, without tiles.

    How long sequences are is not known here, so a window stays one, and a chunk too. The padding
    mask that is given hides nothing.
    """
    window = asked.get("local_size")
    chunk = getattr(asked.get("config"), "attention_chunk_size", None)
    _, is_plain = _window(**{**asked, "attention_mask": None, "local_size": None})
    return Mask(window, only_tiles=not is_plain or (window is not None and window == chunk))


def tiled_mask(**asked: Any) -> Mask:
    """The same with tiles."""
    window, is_described = _window(**asked)
    if not is_described:
        return Mask(None, flex_attention_mask(**asked), only_tiles=True)
    whole = Sight(0, 0, asked["kv_length"])
    return Mask(window, tiles_of(whole, window, None, asked["device"]))


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


def pairs_of(
    sight: Sight, window: int | None, documents: Tensor | None, device: torch.device | str
) -> Tensor:
    """Whether a token sees another one, for all pairs: (sequences or 1, 1, tokens, seen tokens).

    `documents` has the number of the document of each token of whole sequences.
    """
    query = torch.arange(sight.first, sight.stop, device=device)[:, None]
    key = torch.arange(sight.begin, sight.stop, device=device)[None]
    seen = (key <= query)[None]
    if window is not None:
        seen = seen & (key > query - window)
    if documents is not None:
        own = documents[:, sight.first : sight.stop, None]
        seen = seen & (own == documents[:, None, sight.begin : sight.stop])
    return seen[:, None]


def tiles_of(
    sight: Sight, window: int | None, documents: Tensor | None, device: torch.device | str
) -> BlockMask:
    """The same in tiles: of the causal triangle, or of the band that a window leaves of it.

    torch's own function for this compares all pairs of tokens.
    """
    query, query_end = _edges(sight.first, sight.stop, device)
    key, key_end = _edges(sight.begin, sight.stop, device)
    above, below = (query[:, None], query_end[:, None]), (key[None], key_end[None])
    is_seen, is_full = below[0] <= above[1], below[1] <= above[0]
    if window is not None:
        is_seen = is_seen & (below[1] > above[0] - window)
        is_full = is_full & (below[0] > above[1] - window)
    is_seen, is_full = is_seen[None], is_full[None]
    if documents is not None:
        # Their numbers count up along a sequence.
        own, own_end = documents[:, query, None], documents[:, query_end, None]
        other, other_end = documents[:, None, key], documents[:, None, key_end]
        is_seen = is_seen & (other <= own_end) & (own <= other_end)
        is_full = is_full & (other == own_end) & (own == other_end)
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=_TILE,
        mask_mod=_sees(sight, window, documents),
        seq_lengths=(sight.stop - sight.first, sight.stop - sight.begin),
    )


def _edges(start: int, stop: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The first and the last token of each tile."""
    first = torch.arange(start, stop, _TILE, device=device)
    return first, (first + _TILE - 1).clamp(max=stop - 1)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row, and their columns, for all heads."""
    columns = tiles.int().argsort(dim=2, descending=True, stable=True)
    return tiles.sum(2, dtype=torch.int32)[:, None], columns.int()[:, None]


def _sees(
    sight: Sight, window: int | None, documents: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a token sees another one, by their places in the stretches that are given."""
    ahead = sight.first - sight.begin

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query + ahead
        if window is not None:
            seen = seen & (key > query + ahead - window)
        if documents is not None:
            own = documents[sequence, query + sight.first]
            seen = seen & (own == documents[sequence, key + sight.begin])
        return seen

    return sees
