"""Masks in a few numbers, against the matrix of all pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from shardwise.model.masks import described_mask, tiled_mask

TILE = 128


def asked(length: int, **changes: Any) -> dict[str, Any]:
    """What transformers asks for in training."""
    return {
        "batch_size": 2,
        "q_length": length,
        "kv_length": length,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function,
        "attention_mask": None,
        "allow_is_causal_skip": True,
        "dtype": torch.float32,
        "config": SimpleNamespace(),
        "use_vmap": False,
        "device": torch.device("cpu"),
        **changes,
    }


@pytest.mark.parametrize("length", [1, 100, 128, 300, 1041])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 200, 512])
def test_tiles_hold_every_pair_that_is_seen(length: int, window: int | None) -> None:
    found = tiled_mask(**asked(length, local_size=window)).tiles
    assert found is not None
    place = torch.arange(length)
    ago = place[:, None] - place[None]
    seen = (ago >= 0) & (ago < (window or length))
    rows = -(-length // TILE)
    edge = rows * TILE - length
    # Beyond the end of the sequence nothing counts, so it may be taken for seen.
    some = torch.nn.functional.pad(seen, (0, edge, 0, edge)).view(rows, TILE, rows, TILE)
    every = torch.nn.functional.pad(seen, (0, edge, 0, edge), value=True).view(some.shape)
    full = torch.zeros(rows, rows, dtype=torch.bool)
    assert found.full_kv_num_blocks is not None and found.full_kv_indices is not None
    for row in range(rows):
        count = found.full_kv_num_blocks[0, 0, row]
        full[row, found.full_kv_indices[0, 0, row, :count].long()] = True
    assert torch.equal(found.to_dense()[0, 0].bool(), some.any(3).any(1))
    assert not (full & ~every.all(3).all(1)).any(), "a tile was called full that is not"
    keys = found.mask_mod(place, place, place[:, None], place[None])
    assert torch.equal(keys, seen)


def test_a_window_that_no_sequence_reaches_is_none() -> None:
    assert described_mask(**asked(64, local_size=64)).is_causal
    assert described_mask(**asked(65, local_size=64)).window == 64


def test_a_chunk_is_no_window() -> None:
    config = SimpleNamespace(attention_chunk_size=32)
    assert described_mask(**asked(64, local_size=32, config=config)).only_tiles


def test_documents_are_not_taken_for_a_plain_mask() -> None:
    assert described_mask(**asked(64, allow_is_causal_skip=False)).only_tiles
    padded = torch.ones(2, 64, dtype=torch.bool)
    assert described_mask(**asked(64, attention_mask=padded)).only_tiles
