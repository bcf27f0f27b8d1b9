"""Masks in a few numbers, against the matrix of all pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from shardwise.model.masks import Sight, described_mask, pairs_of, part_mask, tiled_mask, tiles_of

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


def test_a_part_of_a_sequence_keeps_its_window() -> None:
    """How long the whole sequence is is not known there."""
    assert part_mask(**asked(64, local_size=100)).window == 100
    padded = torch.ones(2, 64, dtype=torch.bool)
    assert part_mask(**asked(64, attention_mask=padded)).is_causal
    assert part_mask(**asked(64, allow_is_causal_skip=False)).only_tiles
    config = SimpleNamespace(attention_chunk_size=100)
    assert part_mask(**asked(64, local_size=100, config=config)).only_tiles


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("sight", [Sight(0, 200, 520), Sight(130, 400, 700), Sight(512, 512, 700)])
@pytest.mark.parametrize("apart", [False, True])
def test_tiles_of_a_later_stretch(sight: Sight, window: int | None, apart: bool) -> None:
    firsts = torch.zeros(2, 700, dtype=torch.long)
    firsts[0, [0, 128, 300, 301, 512]] = 1
    firsts[1, 650] = 1
    documents = firsts.flatten().cumsum(0).view(2, 700) if apart else None
    seen = pairs_of(sight, window, documents, "cpu")
    found = tiles_of(sight, window, documents, "cpu")
    query, key = torch.arange(seen.shape[2]), torch.arange(seen.shape[3])
    for sequence in range(len(seen)):
        at = torch.tensor(sequence)
        assert torch.equal(found.mask_mod(at, at, query[:, None], key[None]), seen[sequence, 0])
    rows, columns = -(-len(query) // TILE), -(-len(key) // TILE)
    edges = (0, columns * TILE - len(key), 0, rows * TILE - len(query))
    shape = (len(seen), rows, TILE, columns, TILE)
    some = torch.nn.functional.pad(seen[:, 0], edges).view(shape).any(4).any(2)
    every = torch.nn.functional.pad(seen[:, 0], edges, value=True).view(shape).all(4).all(2)
    assert not (some & ~found.to_dense()[:, 0].bool()).any(), "a tile that is seen is left out"
    assert found.full_kv_num_blocks is not None and found.full_kv_indices is not None
    for sequence, row in [(s, r) for s in range(len(seen)) for r in range(rows)]:
        count = found.full_kv_num_blocks[sequence, 0, row]
        full = found.full_kv_indices[sequence, 0, row, :count].long()
        assert every[sequence, row, full].all(), "a tile was called full that is not"
