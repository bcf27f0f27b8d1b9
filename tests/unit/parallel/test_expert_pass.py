"""Experts that keep less: the same numbers, fewer tensors, and nothing else changed."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from kept_tensors import TOKENS, blocks_of, kept_and_gradients
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.kernels.clamped_swiglu import clamped_swiglu
from shardwise.model.quantised import apply_base
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.expert_pass import apply_experts
from shardwise.parallel.remat import apply_remat
from traced import without_kernels

HIDDEN, WIDTH, CHOSEN = 32, 48, 2
REMATS = ("none", "selective", "full")
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
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float32, **other: object) -> nn.Module:
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **other})
    torch.manual_seed(0)
    # The loops over experts that the families spell out.
    model: nn.Module = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            nn.init.normal_(parameter)
    return model.to(dtype)


def experts_of(model: nn.Module) -> nn.Module:
    return next(m for n, m in model.named_modules() if n.endswith("experts"))


def changed(model: nn.Module) -> list[str]:
    names = (type(module).__name__ for module in model.modules())
    return [name for name in names if name.startswith("Grouped")]


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_are_those_of_autograd(family: str, remat: str) -> None:
    plain = model_of(family)
    ours = deepcopy(plain)
    apply_experts(blocks_of(ours))
    assert len(changed(ours)) == 1
    apply_remat(blocks_of(ours), remat)
    for one, other in zip(kept_and_gradients(ours)[1], kept_and_gradients(plain)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# `make test` makes kernels of a whole run in tests/dist/test_compile.py.
TRACED = tuple((family, "none", False) for family in ("mixtral", "gpt_oss"))


@pytest.mark.parametrize(
    ("family", "remat", "kernels"),
    [
        *TRACED,
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in product(("mixtral", "gpt_oss"), REMATS, [True])
        ),
    ],
)
def test_the_compiled_block_keeps_gate_and_up_alone(family: str, remat: str, kernels: bool) -> None:
    plain = model_of(family, torch.bfloat16)
    ours = deepcopy(plain)
    apply_experts(blocks_of(ours))
    apply_remat(blocks_of(ours), remat)
    with nullcontext() if kernels else without_kernels():
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


def test_clamped_experts_have_the_gradients_of_their_own_loop() -> None:
    """Limits are passed, one expert has no token, and one has all of them."""
    plain = experts_of(model_of("gpt_oss", swiglu_limit=3.0))
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    ours = deepcopy(plain)
    apply_experts([ours])
    assert changed(ours)
    x = torch.randn(TOKENS, HIDDEN)
    chosen = torch.stack((torch.ones(TOKENS), torch.arange(TOKENS) % 2 * 3), dim=1).long()
    weights = torch.rand(TOKENS, CHOSEN)
    found, expected = (gradients(each, x, chosen, weights) for each in (ours, plain))
    assert found.keys() == expected.keys() and len(found) == 7
    for name, one in found.items():
        assert one.is_contiguous(), name
        torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=1e-3)
    gate_up = found["gate_up_proj_bias"]
    assert not gate_up[2].any() and (gate_up[1] == 0).float().mean() < 0.5


def gradients(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Tensor]:
    given = [each.clone().requires_grad_() for each in (x, weights)]
    made = experts(given[0], chosen, given[1])
    (made * torch.linspace(-1, 1, made.numel()).view_as(made)).sum().backward()
    learned = {"x": given[0], "weights": given[1], **dict(experts.named_parameters())}
    grads = {name: each.grad for name, each in learned.items() if each.grad is not None}
    return {"made": made.detach(), **grads}


def test_frozen_experts_have_no_gradient() -> None:
    model = model_of("gpt_oss")
    experts = experts_of(model).requires_grad_(False)
    apply_experts(blocks_of(model))
    kept_and_gradients(model)
    assert changed(model) and all(each.grad is None for each in experts.parameters())


@pytest.mark.parametrize("changes", [{"alpha": 1.5}, {"limit": 5.0}])
def test_experts_that_clamp_otherwise_stay_as_they_are(changes: dict[str, float]) -> None:
    """The code uses other numbers than those that the module shows."""
    experts = experts_of(model_of("gpt_oss"))

    def otherwise(pairs: Tensor) -> Tensor:
        return clamped_swiglu(pairs, **{"alpha": 1.702, "limit": 7.0, **changes})

    experts._apply_gate = otherwise  # type: ignore[assignment]
    apply_experts([experts])
    assert not changed(experts)


@pytest.mark.parametrize(
    ("family", "other"),
    [("mixtral", {"hidden_act": "gelu"}), ("llama", {})],
)
def test_other_experts_stay_as_they_are(family: str, other: dict[str, Any]) -> None:
    model = model_of(family, **other)
    apply_experts(blocks_of(model))
    assert not changed(model)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_packed_experts_keep_their_own_forward(family: str) -> None:
    """Found out by small weights they look like others, and our pass would read bytes as floats."""
    model = model_of(family)
    apply_base(model, "float8", multiplies=False)
    x, chosen, weights = torch.randn(6, HIDDEN), torch.arange(12).view(6, 2) % 4, torch.rand(6, 2)
    before = experts_of(model)(x, chosen, weights)
    apply_experts(blocks_of(model))
    assert not changed(model)
    assert torch.equal(experts_of(model)(x, chosen, weights), before)
