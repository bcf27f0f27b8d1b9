"""Norms of all heads at once give what each family's own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.model.override import own_forwards
from shardwise.parallel.head_norms import apply_head_norms, is_norm_by_head


class ByHead(nn.Module):
    """As families write it."""

    def __init__(self, norms: list[Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(1, dim=1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=1)


class Doubled(ByHead):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def norms(count: int = 3, **settings: Any) -> list[nn.LayerNorm]:
    return [nn.LayerNorm(8, **settings) for _ in range(count)]


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_modules_own_code(bias: bool) -> None:
    torch.manual_seed(0)
    module = ByHead(norms(bias=bias))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    parts = [x, *module.parameters()]
    grad = torch.randn(2, 3, 5, 8)
    expected = module(x)
    expected_grads = torch.autograd.grad(expected, parts, grad)
    apply_head_norms([module])
    assert "AtOnce" in type(module).__name__
    found = module(x)
    assert torch.allclose(found, expected, atol=1e-6)
    for one, other in zip(torch.autograd.grad(found, parts, grad), expected_grads, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert found.dtype == module(x.bfloat16().float()).dtype == torch.float32


@pytest.mark.parametrize(
    "module",
    [
        Doubled(norms()),
        ByHead([nn.LayerNorm(8), nn.LayerNorm(8, eps=1e-3)]),
        ByHead(norms(1)),
        ByHead(norms(elementwise_affine=False)),
        ByHead([nn.LayerNorm(8), nn.Identity()]),
        nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)),
    ],
    ids=["does more", "other eps", "one", "no weights", "other layers", "no heads"],
)
def test_what_computes_something_else_is_left_alone(module: nn.Module) -> None:
    assert not is_norm_by_head(module)


def test_stablelm_has_two_in_each_block_and_computes_the_same() -> None:
    config = AutoConfig.for_model(
        "stablelm",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        qk_layernorm=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    apply_head_norms(list(model.model.layers))
    changed = [module for module in model.modules() if "AtOnce" in type(module).__name__]
    assert len(changed) == 4
    tokens = torch.arange(12).view(2, 6)
    found = model(tokens).logits
    with own_forwards(model):
        expected = model(tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)
