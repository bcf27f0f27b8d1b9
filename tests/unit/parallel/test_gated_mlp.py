"""Gated MLPs that keep less: the same numbers, one tensor fewer, and nothing else changed."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from kept_tensors import TOKENS, blocks_of, kept_and_gradients
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.kernels.swiglu import (
    ACTIVATIONS,
    gated,
    gated_backward,
    gated_grads,
    up_and_product,
)
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.gated_mlp import GatedMLP, apply_gated_mlp
from shardwise.parallel.remat import apply_remat
from traced import without_kernels

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HIDDEN, FFN = 32, 80


def model_of(family: str, **other: object) -> nn.Module:
    config = AutoConfig.for_model(
        family, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        pad_token_id=None, **other,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def run(
    remat: str, *, leaner: bool = True, compiled: bool = False
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    model = model_of("llama")
    if leaner:
        apply_gated_mlp(blocks_of(model))
    apply_remat(blocks_of(model), remat)
    if compiled:
        # `make test` makes kernels of a whole run in tests/dist/test_compile.py.
        with nullcontext() if "SHARDWISE_CHAOS" in os.environ else without_kernels():
            apply_compile(blocks_of(model))
    return kept_and_gradients(model)


# A compile takes five seconds and more, so each is run once.
run_compiled = cache(partial(run, compiled=True))


def assert_those_of_autograd(found: list[Tensor]) -> None:
    for one, other in zip(found, kept_and_gradients(model_of("llama"))[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_the_gradients_are_those_of_autograd(remat: str) -> None:
    assert_those_of_autograd(run(remat)[1])


@pytest.mark.parametrize(
    "remat", ["none", "selective", pytest.param("full", marks=pytest.mark.long)]
)
def test_the_gradients_of_compiled_blocks_are_those_of_autograd(remat: str) -> None:
    assert_those_of_autograd(run_compiled(remat)[1])


@pytest.mark.parametrize(
    ("remat", "leaner", "expected"),
    [
        pytest.param("none", False, 3, marks=pytest.mark.long),
        ("none", True, 2),
        pytest.param("selective", False, 2, marks=pytest.mark.long),
        ("selective", True, 2),
    ],
)
def test_the_compiled_block_does_not_keep_the_product(
    remat: str, leaner: bool, expected: int
) -> None:
    kept, _ = run_compiled(remat) if leaner else run(remat, leaner=False, compiled=True)
    assert sum(shape[-1:] == (FFN,) and TOKENS in shape for shape in kept) == expected


def test_what_selective_keeps_where_nothing_is_compiled() -> None:
    """All results of an operator, the product too, as `plan/memory.py` has it."""
    model = model_of("llama")
    apply_gated_mlp(blocks_of(model))
    apply_remat(blocks_of(model), "selective")
    tokens = torch.arange(TOKENS)[None] % 64
    gc.collect()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    wide = {each.data_ptr() for each in tensors if each.numel() == TOKENS * FFN}
    assert loss.requires_grad and len(wide) == 3


@pytest.mark.parametrize("family", ["gemma", "gemma3_text", "phi3", "glm4"])
def test_gates_of_gelu_and_halves_in_one_layer_are_taken(family: str) -> None:
    expected = kept_and_gradients(model_of(family))
    model = model_of(family)
    apply_gated_mlp(blocks_of(model))
    kept, found = kept_and_gradients(model)
    for one, other in zip(found, expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert wide_of(kept) == 2 < wide_of(expected[0])


def wide_of(kept: list[tuple[int, ...]]) -> int:
    """How many tensors as wide as the MLP are saved; both halves may be one of them."""
    sizes = {(FFN,): 1, (2 * FFN,): 2}
    return sum(sizes.get(shape[-1:], 0) for shape in kept if TOKENS in shape)


@pytest.mark.parametrize(
    ("family", "other"),
    [("nemotron", {}), ("llama", {"mlp_bias": True}), ("llama", {"hidden_act": "gelu"})],
)
def test_an_mlp_of_another_kind_is_left_alone(family: str, other: dict[str, object]) -> None:
    model = model_of(family, **other)
    before = [type(module) for module in model.modules()]
    apply_gated_mlp(blocks_of(model))
    assert [type(module) for module in model.modules()] == before


def test_layers_of_another_class_are_left_alone() -> None:
    class Adapted(nn.Linear):
        """As LoRA's are."""

    model = model_of("llama")
    mlp = blocks_of(model)[0].mlp
    mlp.up_proj.__class__ = Adapted  # type: ignore[union-attr]
    before = type(mlp)
    apply_gated_mlp(blocks_of(model))
    assert type(mlp) is before


def test_a_frozen_weight_has_no_gradient() -> None:
    x, gate, up, down = (
        torch.randn(shape, requires_grad=True)
        for shape in ((TOKENS, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    )
    up.requires_grad_(False)
    GatedMLP.apply(x, gate, up, down, "silu").sum().backward()
    assert up.grad is None and gate.grad is not None and down.grad is not None


@NEEDS_GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(512, 1024), (70, 130)])
def test_the_kernels_after_a_matmul(shape: tuple[int, int], activation: str) -> None:
    from shardwise.kernels import swiglu_triton

    made = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(shape, generator=made).bfloat16() for _ in range(3))
    there = [each.cuda() for each in (gate, up, grad)]
    factors = ACTIVATIONS[activation]
    made = swiglu_triton.product(*there[:2], *factors)
    found = [made, *swiglu_triton.gated_backward(*there, *factors), there[2]]
    product = gated(gate, up, activation)
    gate_grad, up_grad = gated_grads(gate, up, grad, activation)
    for one, other in zip(found, (product, up_grad, product, gate_grad), strict=True):
        torch.testing.assert_close(one.cpu(), other.bfloat16(), rtol=2**-7, atol=1e-6)


@NEEDS_GPU
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("hidden", "ffn"), [(512, 1024), (36, 130)])
def test_the_kernels_of_a_gpu(hidden: int, ffn: int, activation: str) -> None:
    """Sizes for which a gate may be inside of a matmul, and for which it may not."""
    made, tokens = torch.Generator().manual_seed(0), 1000
    sizes = (tokens, hidden), (tokens, hidden), (tokens, ffn), (ffn, hidden), (hidden, ffn)
    scales = (1, 1, 1, 1 / 16, 1 / 16)
    given = [
        (torch.randn(size, generator=made) * scale).bfloat16()
        for size, scale in zip(sizes, scales, strict=True)
    ]

    def results(x: Tensor, grad: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
        half, product = up_and_product(x, up, gate, activation)
        return [half, product, *gated_backward(grad, down, gate, half, activation)]

    found, expected = (
        results(*map(take, given)) for take in (lambda each: each.cuda(), lambda each: each.float())
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().float(), other, rtol=2**-6, atol=2**-6)
