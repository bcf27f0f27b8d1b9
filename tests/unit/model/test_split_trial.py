"""Families whose sequences ranks cannot divide are refused with the reason, without a rank."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from shardwise.errors import UserError
from shardwise.model.split_trial import validate_split, why_not_split

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral", "gpt_oss"])
def test_families_that_hand_attention_on_are_divided(family: str) -> None:
    assert reason_for(family, "eager") is None


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "has a Conv1d over tokens"),
        ("bloom", "takes no positions"),
        ("stablelm", "does not hand the arguments of a forward on"),
        ("deepseek_v32", "does more with attention than hand it on"),
        ("llama4_text", "chunks of a sequence"),
    ],
)
def test_others_are_not(family: str, reason: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    assert reason in (reason_for(family, "sdpa") or "")


def test_sdpa_has_no_sinks() -> None:
    assert "sinks, which sdpa does not have" in (reason_for("gpt_oss", "sdpa") or "")


def test_the_family_and_the_reason_are_named() -> None:
    with pytest.raises(UserError, match="sequences of bloom models") as found:
        validate_split("eager", AutoConfig.for_model("bloom", **SIZES).to_dict())
    assert "takes no positions" in found.value.why


def reason_for(family: str, attention: str) -> str | None:
    return why_not_split(attention, AutoConfig.for_model(family, **SIZES).to_dict())
