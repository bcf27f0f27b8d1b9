"""Which attention a model is built with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import ExitCode, UserError
from shardwise.model.attention import attention_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def logits(attention: str, **changes: Any) -> torch.Tensor:
    torch.manual_seed(0)
    family = str(changes.pop("family", "llama"))
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention_of(attention, "cpu")
    )
    found: torch.Tensor = model.train()(torch.arange(16).repeat(2, 1)).logits.detach()
    return found


def test_flash_attention_4_changes_no_logit() -> None:
    torch.testing.assert_close(logits("flash_attention_4"), logits("sdpa"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.1},
        {"family": "mistral", "sliding_window": 8},
        {"family": "gemma2", "head_dim": 8},
    ],
    ids=["dropout", "window", "cap"],
)
def test_flash_attention_4_refuses_what_it_would_leave_out(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"does not do what .*Attention needs"):
        logits("flash_attention_4", **changes)


def test_flash_attention_4_needs_its_package_on_a_gpu() -> None:
    with pytest.raises(UserError, match="needs flash-attn-4") as caught:
        attention_of("flash_attention_4", "cuda")
    assert caught.value.code == ExitCode.ENVIRONMENT
