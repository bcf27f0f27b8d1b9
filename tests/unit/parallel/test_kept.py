"""Selective checkpointing of blocks that change what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.parallel.remat import apply_remat


class InPlace(nn.Module):
    """Reads a matmul's result before it is changed, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        before = y.tanh()
        y.add_(self.bias)
        y[:, :4].mul_(2.0)
        return before + y.sin()


def gradients(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    found = model(*inputs)
    getattr(found, "logits", found).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_result_that_is_changed_in_place_is_recomputed_from_before() -> None:
    torch.manual_seed(0)
    block, x = InPlace(), torch.randn(4, 8)
    expected = gradients(block, x)
    block.zero_grad()
    apply_remat([block], "selective")
    found = gradients(block, x)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gpt_oss_has_the_same_gradients(mode: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", use_cache=False, num_local_experts=4, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.arange(16).repeat(2, 1)
    expected = gradients(model, ids)
    model.zero_grad()
    apply_remat(list(model.model.layers), mode)
    found = gradients(model, ids)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
