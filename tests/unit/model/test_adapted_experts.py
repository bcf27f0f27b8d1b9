"""Which experts get adapters, and of which shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.schema import AdapterConfig
from shardwise.errors import UserError
from shardwise.model.lora import adapter_params, adapters_of, apply_lora
from shardwise.model.peft_format import peft_config

SIZES = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}


def made(family: str, **more: Any) -> Any:
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def adapted(model: Any) -> Any:
    config = AdapterConfig(method="lora", targets=["experts.*"], rank=8)
    apply_lora(model, config, torch.float32)
    return model


def test_a_and_b_have_one_shape_however_weights_lie() -> None:
    model = adapted(made("gpt_oss", intermediate_size=24))
    shapes = {
        name.rpartition(".")[2]: tuple(param.shape) for name, param in adapter_params(model).items()
    }
    assert shapes == {
        "gate_up_proj_lora_A": (4, 8, 32),
        "gate_up_proj_lora_B": (4, 48, 8),
        "down_proj_lora_A": (4, 8, 24),
        "down_proj_lora_B": (4, 32, 8),
    }
    assert all(each.is_transposed for each in adapters_of(model).values())
    plain = adapted(made("mixtral", intermediate_size=24))
    assert not any(each.is_transposed for each in adapters_of(plain).values())


def test_experts_of_an_unknown_form_are_refused() -> None:
    model = made("llama4_text", intermediate_size=24, intermediate_size_mlp=24, moe_layers=[0])
    with pytest.raises(UserError, match="whose experts get no adapters yet") as failure:
        adapted(model)
    assert "adapter.targets=all-linear" in failure.value.fix


@pytest.mark.parametrize("dora", [False, True])
def test_shared_experts_are_named_so_that_peft_adapts_them(dora: bool) -> None:
    model = made("qwen2_moe", shared_expert_intermediate_size=24, moe_intermediate_size=24)
    config = AdapterConfig(method="lora", targets=["q_proj", "shared_expert.*_proj"], dora=dora)
    apply_lora(model, config, torch.float32)
    if dora:
        with pytest.raises(UserError, match="PEFT cannot load DoRA of") as refused:
            peft_config(config, model, None, None)
        assert "--merge" in refused.value.fix
        return
    found = peft_config(config, model, None, None)
    assert found["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    shared = "model.layers.0.mlp.shared_expert"
    parts = ("gate", "up", "down")
    assert found["target_parameters"] == [f"{shared}.{part}_proj.weight" for part in parts]
