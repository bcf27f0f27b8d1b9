"""What a directory may hold besides the model's own tensors, and what may not be told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import UserError
from shardwise.model.pretrained import load_pretrained

COMMON: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GPTJ = {"model_type": "gptj", "vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2}
Change = Callable[[dict[str, Any]], Any]


def build(**config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def saved(place: Path, change: Change, **config: Any) -> PreTrainedModel:
    """A model whose files in `place` are changed."""
    torch.manual_seed(0)
    model = build(**config)
    model.save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return model


def assert_loads(place: Path, model: PreTrainedModel, **config: Any) -> None:
    torch.manual_seed(1)
    other = build(**config)
    load_pretrained(other, place)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_old_rotary_frequencies_stay_unread(tmp_path: Path) -> None:
    config = {"model_type": "llama", **COMMON}
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = saved(tmp_path, lambda t: t.update({name: torch.ones(4)}), **config)
    assert_loads(tmp_path, model, **config)


def test_old_causal_masks_stay_unread(tmp_path: Path) -> None:
    config = {**GPTJ, "rotary_dim": 4}
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e9),
    }
    model = saved(tmp_path, lambda t: t.update(masks), **config)
    assert_loads(tmp_path, model, **config)


def test_a_bias_that_nothing_takes_is_no_mask(tmp_path: Path) -> None:
    config = {"model_type": "llama", **COMMON}
    name = "model.layers.0.self_attn.q_proj.bias"
    saved(tmp_path, lambda t: t.update({name: torch.ones(16)}), **config)
    with pytest.raises(UserError, match=r"1 tensors in .* have no place in the model") as caught:
        load_pretrained(build(**config), tmp_path)
    assert name in caught.value.why


def test_layers_that_the_class_leaves_to_others_stay_unread(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        **COMMON,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    extra = {"mtp.layers.0.weight": torch.ones(3)}
    model = saved(tmp_path, lambda t: t.update(extra), **config)
    assert_loads(tmp_path, model, **config)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_a_tied_embedding_must_be_equal(equal: bool, tmp_path: Path) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": True, **COMMON}

    def add_head(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][0, 0] += 0.0 if equal else 1.0

    model = saved(tmp_path, add_head, **config)
    if equal:
        assert_loads(tmp_path, model, **config)
        return
    with pytest.raises(UserError, match="differ in the files") as caught:
        load_pretrained(build(**config), tmp_path)
    assert "model.overrides.tie_word_embeddings=false" in caught.value.fix
