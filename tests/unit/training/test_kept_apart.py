"""Whether a model keeps documents apart is tried out before it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.training.document_attention import check_documents


class Sums(nn.Module):
    """Every token's logits are the sum of what came before it, of its document or of all."""

    def __init__(self, *, apart: bool, rounding: float = 0.0) -> None:
        super().__init__()
        self.apart, self.rounding = apart, rounding

    def forward(self, input_ids: Tensor, position_ids: Tensor, **given: Any) -> Any:
        sums = input_ids.cumsum(1)
        if self.apart:
            first = torch.arange(input_ids.shape[1]) - position_ids
            sums = sums - (sums - input_ids).gather(1, first)
        # Other documents may change how sums are rounded.
        rounding = 1 + self.rounding * input_ids[0, 0]
        return SimpleNamespace(logits=sums[..., None].float() * rounding)


class Deaf(nn.Module):
    """It takes tokens, and nothing else."""

    def forward(self, input_ids: Tensor) -> Any:
        raise AssertionError("not called")


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_model_that_keeps_them_apart_is_left_as_it_was(rounding: float) -> None:
    model = Sums(apart=True, rounding=rounding)
    check_documents(model, torch.device("cpu"), torch.float32)
    assert model.training


def gpt_oss(attention: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gpt_oss", **sizes, **heads, layer_types=kinds, num_hidden_layers=2, sliding_window=4
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_a_family_without_positions_in_its_masks_gets_them() -> None:
    """The window of four tokens ends inside the second document."""
    model = gpt_oss("eager")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    apart = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]), "use_cache": False}

    def second() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, **apart).logits[:, 4:]
        return logits

    with torch.no_grad():
        alone = model(input_ids=ids[:, 4:], use_cache=False).logits
    assert not torch.allclose(second(), alone, atol=1e-3)
    check_documents(model, torch.device("cpu"), torch.float32)
    assert torch.allclose(second(), alone, atol=1e-6)


def test_a_family_that_reads_masks_otherwise_is_refused() -> None:
    """OPT finds positions in its mask."""
    sizes = {"hidden_size": 32, "ffn_dim": 48, "vocab_size": 64, "word_embed_proj_dim": 32}
    config = AutoConfig.for_model("opt", **sizes, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="cannot be kept apart in this model"):
        check_documents(model, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Sums(apart=False), "changes the logits of the next one"), (Deaf(), "position_ids")],
    ids=["mixes", "deaf"],
)
def test_one_that_does_not_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(UserError, match="cannot be kept apart in this model") as caught:
        check_documents(model, torch.device("cpu"), torch.float32)
    assert why in str(caught.value)
