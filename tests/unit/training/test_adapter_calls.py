"""A layer whose weight is read past its forward gets no adapters unnoticed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.config.schema import AdapterConfig
from shardwise.errors import UserError
from shardwise.model.lora import apply_lora, initialise_adapters
from shardwise.training.adapter_calls import validate_called

IDS = torch.arange(4)[None]


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 8}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    apply_lora(made, AdapterConfig(method="lora", rank=2), torch.float32)
    initialise_adapters(made, 0)
    return made


def test_layers_that_are_called_pass(model: Any) -> None:
    validate_called(model, IDS)
    assert not model.model.layers[0].mlp.down_proj._forward_pre_hooks


def test_a_weight_that_is_read_is_named(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (x @ self.up_proj.weight.t()) @ self.down_proj.weight.t()

    for layer in model.model.layers:
        layer.mlp.forward = MethodType(forward, layer.mlp)
    with pytest.raises(UserError, match=r"does not call model\.layers\.\*\.mlp\.down_proj"):
        validate_called(model, IDS)


def test_a_kind_of_which_some_are_called_passes(model: Any) -> None:
    skipped = model.model.layers[1].mlp
    skipped.forward = MethodType(lambda self, x: x, skipped)
    validate_called(model, IDS)
