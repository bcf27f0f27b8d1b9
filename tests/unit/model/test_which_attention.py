"""Which attention a model is built with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import ExitCode, UserError
from shardwise.model.attention_choice import attention_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def logits(attention: str, *, compiled: bool = False, **changes: Any) -> torch.Tensor:
    torch.manual_seed(0)
    family = str(changes.pop("family", "llama"))
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention_of(attention, "cpu")
    )
    if compiled:
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    with torch.no_grad():
        found: torch.Tensor = model.train()(torch.arange(16).repeat(2, 1)).logits
    return found


WINDOWS = {
    "none": {},
    "mistral": {"family": "mistral", "sliding_window": 8},
    "gemma 2": {"family": "gemma2", "head_dim": 8, "sliding_window": 4},
    "gemma 3": {"family": "gemma3_text", "head_dim": 8, "sliding_window": 4},
    "gpt-oss": {"family": "gpt_oss", "head_dim": 8, "sliding_window": 4, "num_local_experts": 4},
}


# A compile takes a second. These two have no window, and one in every other block beside sinks.
COMPILED = ("none", "gpt-oss")


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        *(pytest.param(changes, False, id=f"{name}-eager") for name, changes in WINDOWS.items()),
        *(pytest.param(WINDOWS[name], True, id=f"{name}-compiled") for name in COMPILED),
    ],
)
def test_flash_attention_4_changes_no_logit(changes: dict[str, Any], *, compiled: bool) -> None:
    ours = logits("flash_attention_4", compiled=compiled, **changes)
    torch.testing.assert_close(ours, logits("eager", **changes))


@pytest.mark.parametrize(
    "changes",
    [{"attention_dropout": 0.1}, {"family": "llama4_text", "attention_chunk_size": 8}],
    ids=["dropout", "chunks"],
)
def test_flash_attention_4_refuses_what_it_would_leave_out(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"does not do what .*Attention needs"):
        logits("flash_attention_4", **changes)


def test_flash_attention_4_needs_its_package_on_a_gpu() -> None:
    with pytest.raises(UserError, match="needs flash-attn-4") as caught:
        attention_of("flash_attention_4", "cuda")
    assert caught.value.code == ExitCode.ENVIRONMENT
