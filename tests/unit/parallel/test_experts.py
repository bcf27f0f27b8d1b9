"""Experts that keep less: the same numbers, fewer tensors, and nothing else changed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.parallel.compile import apply_compile
from shardwise.parallel.experts import apply_experts
from shardwise.parallel.remat import apply_remat

TOKENS, HIDDEN, WIDTH, CHOSEN = 24, 32, 48, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": CHOSEN,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": WIDTH},
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
        "moe_intermediate_size": WIDTH, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float32, **other: object) -> nn.Module:
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **other})
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(dtype)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]


def changed(model: nn.Module) -> list[str]:
    names = (type(module).__name__ for module in model.modules())
    return [name for name in names if name.startswith("Grouped")]


def kept_and_gradients(model: nn.Module) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Shapes that a forward keeps for backward, and what backward makes of it."""
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    tokens = torch.arange(TOKENS)[None] % 64
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    return kept, [loss.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_are_those_of_autograd(family: str, remat: str) -> None:
    plain = model_of(family)
    ours = deepcopy(plain)
    apply_experts(blocks_of(ours))
    assert len(changed(ours)) == 1
    apply_remat(blocks_of(ours), remat)
    for one, other in zip(kept_and_gradients(ours)[1], kept_and_gradients(plain)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "remat", ["none", *(pytest.param(one, marks=pytest.mark.long) for one in ("selective", "full"))]
)
def test_the_compiled_block_keeps_the_halves_alone(remat: str) -> None:
    plain = model_of("mixtral", torch.bfloat16)
    ours = deepcopy(plain)
    apply_experts(blocks_of(ours))
    apply_remat(blocks_of(ours), remat)
    apply_compile(blocks_of(ours))
    kept, found = kept_and_gradients(ours)
    wide = [shape for shape in kept if shape[:1] == (CHOSEN * TOKENS,) and len(shape) == 2]
    assert wide == ([] if remat == "full" else [(CHOSEN * TOKENS, 2 * WIDTH)])
    exact = kept_and_gradients(plain.float())[1]
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other).norm() < 0.05 * other.norm()


def test_an_expert_without_a_token_has_a_gradient_of_zeros() -> None:
    ours = model_of("mixtral", num_local_experts=8, num_experts_per_tok=1)
    router = next(m for n, m in ours.named_modules() if n.endswith("gate"))
    with torch.no_grad():
        router.weight.zero_()  # type: ignore[operator, union-attr]
    apply_experts(blocks_of(ours))
    kept_and_gradients(ours)
    grads = [p.grad for n, p in ours.named_parameters() if n.endswith("gate_up_proj")]
    assert grads[0] is not None
    used = grads[0].flatten(1).abs().sum(1) > 0
    assert used.sum() == 1
    assert torch.isfinite(grads[0]).all()


@pytest.mark.parametrize(
    ("family", "other"),
    [("gpt_oss", {"num_local_experts": 4}), ("mixtral", {"hidden_act": "gelu"}), ("llama", {})],
)
def test_other_experts_stay_as_they_are(family: str, other: dict[str, Any]) -> None:
    model = model_of(family, **other)
    apply_experts(blocks_of(model))
    assert not changed(model)
