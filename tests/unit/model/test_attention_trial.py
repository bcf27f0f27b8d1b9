"""Attentions of ours for families that do not declare that they take them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from shardwise.model.counted_sizes import count_on_meta

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
OURS = {"flash_attention_4", "flex_attention"}


@pytest.mark.parametrize("family", ["stablelm", "olmoe"])
def test_a_family_that_calls_registered_attentions_has_ours(family: str) -> None:
    assert set(attentions_of(family)) >= OURS


def test_a_family_with_attention_code_of_its_own_has_none_of_ours() -> None:
    """Falcon looks its attention up in a table of its own."""
    assert not OURS & set(attentions_of("falcon"))


def attentions_of(family: str) -> tuple[str, ...]:
    config = AutoConfig.for_model(family, **SIZES)
    return count_on_meta(family, config.to_dict()).attentions
