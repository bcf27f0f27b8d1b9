from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.facts.presets import PRESETS
from shardwise.kernels.cross_entropy import IGNORE_INDEX, turn_into_gradient
from shardwise.model.build import build_on_meta
from shardwise.model.head import find_form
from shardwise.model.weights import initialise_buffers
from shardwise.training.head_trial import refuse_chunked, why_not_chunked
from shardwise.training.loss import (
    LinearCrossEntropy,
    Slicing,
    _scaled,
    attach_loss,
    prepare_head,
)

TOKENS, HIDDEN, VOCAB = 37, 16, 29
IDS = torch.arange(8)[None]


class Inputs(SimpleNamespace):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


def make_inputs(dtype: torch.dtype, *, bias: bool = True, ignored: int = 5) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(dtype).requires_grad_()

    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[torch.randperm(TOKENS, generator=generator)[:ignored]] = IGNORE_INDEX
    return Inputs(
        hidden=leaf(TOKENS, HIDDEN),
        weight=leaf(VOCAB, HIDDEN),
        bias=leaf(VOCAB) if bias else None,
        labels=labels,
    )


def chunked(given: Inputs, chunk: int) -> Tensor:
    slicing = Slicing(chunk, turn_into_gradient, _scaled)
    loss: Tensor = LinearCrossEntropy.apply(
        given.hidden, given.weight, given.bias, given.labels, slicing
    )
    return loss


def whole(given: Inputs) -> Tensor:
    logits = F.linear(given.hidden, given.weight, given.bias)
    return F.cross_entropy(logits, given.labels, ignore_index=IGNORE_INDEX, reduction="sum")


def gradients(loss: Tensor, given: Inputs) -> list[Tensor]:
    leaves = [given.hidden, given.weight, *([] if given.bias is None else [given.bias])]
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))


def assert_equal_to_autograd(given: Inputs, chunk: int, factor: float = 1.0) -> None:
    ours, theirs = chunked(given, chunk), whole(given)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-5)
    ours_grads = gradients(ours * factor, given)
    theirs_grads = gradients(theirs * factor, given)
    for ours_grad, theirs_grad in zip(ours_grads, theirs_grads, strict=True):
        assert ours_grad.dtype == theirs_grad.dtype
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=1e-5 * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS - 1, TOKENS, 1000])
def test_chunked_loss_equals_cross_entropy(dtype: torch.dtype, bias: bool, chunk: int) -> None:
    assert_equal_to_autograd(make_inputs(dtype, bias=bias), chunk)


@pytest.mark.parametrize("ignored", [0, 1, TOKENS - 1])
def test_ignored_labels_count_nothing(ignored: int) -> None:
    given = make_inputs(torch.float32, ignored=ignored)
    assert_equal_to_autograd(given, 8)
    rows = gradients(chunked(given, 8), given)[0]
    assert not rows[given.labels == IGNORE_INDEX].any()


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    given = make_inputs(torch.float32, ignored=TOKENS)
    loss = chunked(given, 8)
    assert loss.item() == 0.0
    assert all(not grad.any() for grad in gradients(loss, given))


@pytest.mark.parametrize("factor", [1 / 1234, 65536.0])
def test_a_scaled_loss_scales_its_gradients(factor: float) -> None:
    assert_equal_to_autograd(make_inputs(torch.float32), 8, factor)


def test_large_logits_do_not_overflow() -> None:
    given = make_inputs(torch.float32)
    given.hidden = (given.hidden.detach() * 1000).requires_grad_()
    loss = chunked(given, 8)
    torch.testing.assert_close(loss, whole(given), rtol=1e-5, atol=0)
    assert all(torch.isfinite(grad).all() for grad in gradients(loss, given))


def test_a_frozen_head_gets_no_gradient() -> None:
    given = make_inputs(torch.float32)
    given.weight.requires_grad_(False)
    assert given.bias is not None
    given.bias.requires_grad_(False)
    assert_equal_to_autograd(given, 8)
    assert given.weight.grad is None


def test_a_head_over_frozen_hidden_states_learns() -> None:
    given = make_inputs(torch.float32)
    given.hidden.requires_grad_(False)
    assert_equal_to_autograd(given, 8)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bf16_gradients_lose_no_more_than_the_formats_bits() -> None:
    rounded = make_inputs(torch.bfloat16)
    assert rounded.bias is not None
    exact = Inputs(
        hidden=rounded.hidden.detach().double().requires_grad_(),
        weight=rounded.weight.detach().double().requires_grad_(),
        bias=rounded.bias.detach().double().requires_grad_(),
        labels=rounded.labels,
    )
    expected = gradients(whole(exact), exact)
    for target, found in zip(expected, gradients(chunked(rounded, 8), rounded), strict=True):
        assert (found.double() - target).norm() <= torch.finfo(torch.bfloat16).eps * target.norm()


def real_model(preset: str) -> Any:
    return filled(build_on_meta(PRESETS[preset]))


def filled(model: Any) -> Any:
    """The model with random weights, and with the buffers of its family."""
    twin = copy.deepcopy(model)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    initialise_buffers(model, twin, torch.device("cpu"))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.05)
    return model


# Families that scale or cap around the head, and what they are found to do.
SIZES: dict[str, Any] = {
    **{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4},
}
AROUND_HEAD: dict[str, tuple[dict[str, Any], HeadForm]] = {
    "granite": ({"logits_scaling": 6.0}, HeadForm(scale=0.1666667)),
    "cohere2": ({"logit_scale": 0.25}, HeadForm(scale=0.25)),
    "gemma2": ({"final_logit_softcapping": 3.0}, HeadForm(cap=3.0)),
    "minicpm3": ({"dim_model_base": 8, **LATENT}, HeadForm(hidden_scale=0.25)),
}


@pytest.mark.parametrize("family", AROUND_HEAD)
def test_a_form_is_found_and_computed(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("a family of later releases")
    changes, form = AROUND_HEAD[family]
    config = {"model_type": family, **SIZES, **changes}
    assert find_form(build_on_meta(config, attention=None)) == form
    model = filled(build_on_meta(config, attention=None))
    assert why_not_chunked(model, IDS, form) is None
    assert why_not_chunked(model, IDS, PLAIN) is not None
    assert_both_losses_agree(model, form)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen", "tiny-gpt2"])
def test_both_losses_of_a_model_agree(preset: str) -> None:
    assert_both_losses_agree(real_model(preset), PLAIN)


def assert_both_losses_agree(model: Any, form: HeadForm) -> None:
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    prepare_head(model, 10, compiled=False, own_kernels=False, form=form)
    found = []
    for is_chunked in (False, True):
        attach_loss(model, chunked=is_chunked)
        model.zero_grad()
        loss = model.sum_loss(ids, labels)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    (full, full_grads), (sliced, sliced_grads) = found
    torch.testing.assert_close(sliced, full)
    for mine, reference in zip(sliced_grads, full_grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_the_head_still_gives_logits_without_labels() -> None:
    model = real_model("tiny-llama")
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    prepare_head(model, 10, compiled=False, own_kernels=False)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen", "tiny-gpt2", "tiny-mixtral"])
def test_plain_heads_may_be_chunked(preset: str) -> None:
    model = real_model(preset)
    prepare_head(model, 10, compiled=False, own_kernels=False)
    assert why_not_chunked(model, IDS, PLAIN) is None
    assert model.training


def capped(model: Any) -> Any:
    """The same model with a soft cap after its head."""
    plain = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.__class__ = type("Capped", (type(model),), {"forward": forward})
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_after_the_head_is_noticed_unless_the_plan_knows_it(dtype: torch.dtype) -> None:
    model = capped(real_model("tiny-llama")).to(dtype)
    reason = why_not_chunked(model, IDS, PLAIN)
    assert reason == "it transforms the logits after the head"
    assert "memory.loss=full" in refuse_chunked(reason).fix
    assert why_not_chunked(model, IDS, HeadForm(cap=30.0)) is None
    for other in (HeadForm(cap=32.0), HeadForm(scale=1.1, cap=30.0), HeadForm(scale=0.5)):
        assert why_not_chunked(model, IDS, other) == reason
    reason = why_not_chunked(model, IDS, HeadForm(hidden_scale=2.0, cap=30.0))
    assert reason == "it transforms the last hidden state before the head"


def test_a_model_without_a_linear_head_is_noticed() -> None:
    assert why_not_chunked(nn.Linear(2, 2), IDS, PLAIN) is not None


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_odd_size_is_padded_without_a_trace(*, bias: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    offset, labels = torch.randn(VOCAB), torch.randint(VOCAB, (TOKENS,))
    learns = [each.requires_grad_() for each in (hidden, weight, offset)]
    found = []
    for even in (1, 8):
        how = Slicing(10, turn_into_gradient, _scaled, even)
        given = (hidden, weight, offset if bias else None, labels, how)
        loss = LinearCrossEntropy.apply(*given)
        grads = torch.autograd.grad(loss, learns, allow_unused=True)
        found.append([loss, *(grad for grad in grads if grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
