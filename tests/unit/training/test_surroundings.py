"""What surrounds the steps of a run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask

from shardwise.training.surroundings import fast_attention


def mask() -> torch.Tensor | None:
    """The mask that a model asks for, of positions whose values nobody can read."""
    config = AutoConfig.for_model(
        "llama", hidden_size=8, num_attention_heads=1, attn_implementation="sdpa"
    )
    with torch.device("meta"):
        states, positions = torch.empty(2, 4, 8), torch.arange(4)[None]
    made: torch.Tensor | None = create_causal_mask(
        config, states, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return made


def test_the_host_reads_no_positions_to_find_packed_sequences() -> None:
    with fast_attention(torch.device("cpu")):
        assert mask() is None
    with pytest.raises(RuntimeError, match="meta"):
        mask()
