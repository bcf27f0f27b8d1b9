"""Which results selective checkpointing saves."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.schema import AdapterConfig
from shardwise.facts.presets import PRESETS
from shardwise.model.lora import apply_lora
from shardwise.parallel.remat import apply_remat, is_costly

ATEN = torch.ops.aten
TOKENS, WIDTH, OUT, RANK = 8, 512, 1024, 16
BY = {columns: torch.empty(columns, OUT) for columns in (WIDTH, RANK)}


def rows(columns: int) -> torch.Tensor:
    return torch.empty(TOKENS, columns)


def test_a_layers_result_is_costly_and_an_adapters_is_not() -> None:
    bias = torch.empty(OUT)
    assert is_costly(ATEN.mm.default, (rows(WIDTH), BY[WIDTH]))
    assert not is_costly(ATEN.mm.default, (rows(RANK), BY[RANK]))
    assert is_costly(ATEN.addmm.default, (bias, rows(WIDTH), BY[WIDTH]))
    assert not is_costly(ATEN.addmm.default, (bias, rows(RANK), BY[RANK]))


def test_a_long_sum_is_costly_however_wide_its_result_is() -> None:
    latent, wide = torch.empty(TOKENS, 512, device="meta"), torch.empty(512, 2**15, device="meta")
    assert is_costly(ATEN.mm.default, (latent, wide))


def test_experts_have_adapters_too() -> None:
    for columns, saved in ((WIDTH, True), (RANK, False)):
        stack = torch.empty(4, columns, OUT)
        assert is_costly(ATEN._grouped_mm.default, (rows(columns), stack)) == saved


def test_attention_without_a_kernel_is_costly_and_elementwise_operators_are_not() -> None:
    scores = torch.empty(2, TOKENS, RANK), torch.empty(2, RANK, 64 * TOKENS)
    assert is_costly(ATEN.bmm.default, scores)
    assert not is_costly(ATEN.mul.Tensor, (rows(WIDTH), 2))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(input_ids=torch.arange(TOKENS)[None]).logits.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_adapters_that_are_recomputed_have_the_same_gradients() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "use_cache": False}
    models = []
    for remat in ("none", "selective"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**PRESETS["tiny-llama"], **shape})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        apply_lora(model, AdapterConfig(method="lora", rank=4), torch.float32)
        for param in model.parameters():
            if param.requires_grad:
                nn.init.normal_(param, std=0.1)
        apply_remat(list(model.model.layers), remat)
        models.append(model)
    expected, found = map(gradients, models)
    assert expected.keys() == found.keys() and len(found) == 14
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
