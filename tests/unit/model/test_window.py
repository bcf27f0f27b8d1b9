"""A window as long as the sequence changes nothing, and is left out."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.model.build import drop_idle_window

CONFIG = {
    "model_type": "mistral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 16,
}


def logits(config: dict[str, object], ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **sizes))
    found: torch.Tensor = model.eval()(ids).logits.detach()
    return found


def test_a_window_of_the_sequences_length_is_dropped_and_changes_no_logit() -> None:
    without = dict(drop_idle_window(CONFIG, 16))
    assert without["sliding_window"] is None
    ids = torch.arange(16)[None]
    torch.testing.assert_close(logits(without, ids), logits(CONFIG, ids))


def test_a_shorter_window_is_kept_and_would_change_logits() -> None:
    assert drop_idle_window(CONFIG, 17) == CONFIG
    ids = torch.arange(24)[None]
    assert not torch.allclose(logits({**CONFIG, "sliding_window": None}, ids), logits(CONFIG, ids))


def test_other_families_keep_theirs() -> None:
    other = {**CONFIG, "model_type": "qwen2"}
    assert drop_idle_window(other, 8) == other
