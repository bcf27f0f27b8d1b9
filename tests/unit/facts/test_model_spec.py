import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.facts.counted import preset_spec
from shardwise.facts.families import UnknownFamily, spec_from_config
from shardwise.facts.models import ModelSpec
from shardwise.facts.other_presets import OTHER_PRESETS
from shardwise.facts.presets import PRESETS

COMPUTED = [name for name in PRESETS if name not in OTHER_PRESETS]

PUBLISHED_BILLIONS = {
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "mistral-7b": 7.24,
    "mistral-small-24b": 23.57,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "phi-4": 14.66,
    "glm-4.5-air": 106.85,
    "deepseek-v3": 671.03,
    "olmo-3-7b": 7.3,
    "olmo-3-32b": 32.23,
    "smollm3-3b": 3.08,
    "granite-4.0-micro": 3.4,
    "granite-4.0-h-micro": 3.19,
    "granite-4.0-h-tiny": 6.94,
    "granite-4.0-h-small": 32.21,
    "mixtral-8x7b": 46.7,
    "gemma-2b": 2.506,
    "gemma-7b": 8.538,
    "gpt2": 0.1244,
}


def build_on_meta(hf_config: dict[str, Any]) -> torch.nn.Module:
    # transformers writes into the dictionaries that it is given.
    own = deepcopy(hf_config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**own))


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_against_a_real_model(name: str, hf_config: dict[str, Any]) -> None:
    spec, model = spec_from_config(name, hf_config), build_on_meta(hf_config)
    trunk = model.transformer if spec.model_type == "gpt2" else model.model
    blocks = trunk.h if spec.model_type == "gpt2" else trunk.layers
    embeddings = [trunk.wte, trunk.wpe] if spec.model_type == "gpt2" else [trunk.embed_tokens]
    assert spec.total_params == count(model)
    assert spec.embedding_params == sum(map(count, embeddings))
    assert {spec.block_params} == {count(block) for block in blocks}
    assert spec.num_layers == len(blocks)
    assert spec.tied_embeddings == (model.get_output_embeddings().weight is embeddings[0].weight)
    assert spec.matmul_params_per_token == matmul_params(model, spec)


def matmul_params(model: torch.nn.Module, spec: ModelSpec) -> int:
    """Every weight matrix outside the embeddings, a token's own share of the experts."""
    total = spec.vocab_size * spec.hidden_size
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
            continue
        share = spec.experts_per_token / spec.num_experts if parameter.dim() == 3 else 1
        total += round(parameter.numel() * share)
    return total


@pytest.mark.parametrize("name", COMPUTED)
def test_preset_counts_equal_a_real_model(name: str) -> None:
    check_against_a_real_model(name, PRESETS[name])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny-llama", {"attention_bias": True}),
        ("tiny-llama", {"mlp_bias": True, "head_dim": 64}),
        ("tiny-llama", {"num_key_value_heads": None, "tie_word_embeddings": True}),
        ("tiny-qwen", {"tie_word_embeddings": False}),
        ("tiny-qwen", {"model_type": "qwen3", "attention_bias": True, "head_dim": 16}),
        ("tiny-qwen", {"model_type": "qwen3"}),
        ("tiny-llama", {"model_type": "gemma", "attention_bias": True}),
        ("tiny-llama", {"model_type": "mistral", "attention_bias": True, "head_dim": 16}),
        ("tiny-mixtral", {"num_experts_per_tok": 1, "num_local_experts": 3}),
        ("tiny-gpt2", {"n_inner": 100, "tie_word_embeddings": False}),
    ],
)
def test_switches_of_the_families(name: str, changes: dict[str, Any]) -> None:
    check_against_a_real_model(name, PRESETS[name] | changes)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("tiny-llama", "num_key_value_heads"),
        ("tiny-llama", "tie_word_embeddings"),
        ("gemma-2b", "tie_word_embeddings"),
        ("gemma-2b", "head_dim"),
        ("qwen3-8b", "head_dim"),
        ("tiny-gpt2", "tie_word_embeddings"),
    ],
)
def test_absent_fields_mean_what_transformers_means(name: str, absent: str) -> None:
    hf_config = {key: value for key, value in PRESETS[name].items() if key != absent}
    check_against_a_real_model(name, hf_config)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_published_totals(name: str, billions: float) -> None:
    digits = len(str(billions).split(".")[1])
    assert round(preset_spec(name).total_params / 1e9, digits) == billions


def test_every_published_preset_has_its_total_checked() -> None:
    own = {name for name in PRESETS if name.startswith(("tiny-", "small-"))}
    assert own | PUBLISHED_BILLIONS.keys() == PRESETS.keys()
    assert 20e6 < spec_from_config("s", PRESETS["small-llama"]).total_params < 30e6


@pytest.mark.parametrize("name", [name for name in COMPUTED if "gpt2" not in name])
def test_rope_reaches_transformers(name: str) -> None:
    preset = PRESETS[name]
    rope = AutoConfig.for_model(**deepcopy(preset)).rope_parameters
    scaling = preset.get("rope_scaling") or {"rope_type": "default"}
    assert rope == {**scaling, "rope_theta": preset["rope_theta"]}


@pytest.mark.parametrize("name", PRESETS)
def test_own_presets_hold_the_byte_tokenizer_and_drop_nothing(name: str) -> None:
    preset = PRESETS[name]
    assert preset["eos_token_id"] < preset["vocab_size"]
    assert preset["architectures"][0] in type(build_tiny(name)).__name__
    if name.startswith(("tiny-", "small-")):
        assert preset["vocab_size"] >= 257
        assert not any(preset.get(key) for key in preset if "drop" in key)


def build_tiny(name: str) -> torch.nn.Module:
    layers = "n_layer" if "gpt2" in name else "num_hidden_layers"
    preset = PRESETS[name] | {layers: 1}
    if "layer_types" in preset:
        preset["layer_types"] = preset["layer_types"][:1]
    return build_on_meta(preset)


@pytest.mark.parametrize(
    "hf_config",
    [
        {"model_type": "mamba"},
        {},
        {key: v for key, v in PRESETS["tiny-llama"].items() if key != "hidden_size"},
        {key: v for key, v in PRESETS["mistral-7b"].items() if key != "num_key_value_heads"},
        PRESETS["gpt2"] | {"add_cross_attention": True},
    ],
)
def test_what_is_not_known_is_refused(hf_config: dict[str, Any]) -> None:
    with pytest.raises(UnknownFamily):
        spec_from_config("x", hf_config)


def test_json_round_trip() -> None:
    for name in COMPUTED:
        spec = spec_from_config(name, PRESETS[name])
        assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
        assert spec.source == "config.json"
