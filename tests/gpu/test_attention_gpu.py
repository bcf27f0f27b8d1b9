"""Attention of whole models on a GPU, against transformers' eager one in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.facts.installed import has_flash_attention
from shardwise.model.attention_choice import attention_of
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.remat import apply_remat

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no GPU: nothing here was tested"
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 300,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 256},
    # Every token goes to all experts: a choice of two would flip by rounding.
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 256},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {},
}
# Heads that are no power of two wide, as GPT-NeoX, Phi-2, StableLM 2 and MLA have them.
WIDTHS = (80, 96, 112, 160, 192)


def losses_and_gradients(
    family: str,
    attention: str,
    mode: str,
    *,
    compiled: bool,
    dtype: torch.dtype,
    **changes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    blocks = list(model.model.layers)
    apply_remat(blocks, mode)
    if compiled:
        torch.compiler.reset()
        apply_compile(blocks)
    model.to("cuda", dtype)
    ids = torch.randint(0, 512, (2, 1040), generator=torch.Generator().manual_seed(1)).cuda()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().cpu(), torch.cat(grads).cpu()


# transformers' experts cannot be compiled in fp32, so the blocks of gpt-oss would fall apart.
CASES = [
    (family, mode)
    for family in FAMILIES
    for mode in ("none", "selective", "full")
    if family != "gpt_oss" or mode == "none"
]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_flex_attention_is_exact(family: str, mode: str) -> None:
    """In fp32 it differs from eager by rounding alone."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ours = losses_and_gradients(
        family,
        attention_of("flex_attention", "cuda"),
        mode,
        compiled=True,
        dtype=torch.float32,
    )
    exact = losses_and_gradients(family, "eager", "none", compiled=False, dtype=torch.float32)
    torch.testing.assert_close(ours[0], exact[0], rtol=1e-5, atol=1e-5)
    error = (ours[1] - exact[1]).norm() / exact[1].norm()
    assert error < 2e-3, f"gradients are {error:.1e} off"


@pytest.mark.skipif(not has_flash_attention(), reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_4_is_as_exact_as_bf16_allows(family: str) -> None:
    assert error_in_bf16(family) < 2 * error_in_bf16(family, eager=True)


@pytest.mark.skipif(not has_flash_attention(), reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("width", WIDTHS)
def test_flash_attention_4_takes_heads_of_any_width(width: int) -> None:
    allowed = 2 * error_in_bf16("llama", eager=True, head_dim=width)
    assert error_in_bf16("llama", head_dim=width) < allowed


def error_in_bf16(family: str, *, eager: bool = False, **changes: int) -> float:
    """How far all gradients are off those of eager attention in fp32."""
    name = "eager" if eager else attention_of("flash_attention_4", "cuda")
    wide, narrow = torch.float32, torch.bfloat16
    _, exact = losses_and_gradients(family, "eager", "none", compiled=False, dtype=wide, **changes)
    _, ours = losses_and_gradients(
        family, name, "none", compiled=not eager, dtype=narrow, **changes
    )
    return float((ours - exact).norm() / exact.norm())
