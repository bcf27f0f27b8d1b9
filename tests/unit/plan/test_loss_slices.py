"""Tokens of a slice of the chunked loss: as many as cost no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.plan.basis import narrow_slice_tokens
from shardwise.plan.planned import Plan

PlanOf = Callable[..., Plan]


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("llama-3.1-8b", 4096),
        ("llama-3.1-70b", 8192),
        ("qwen3-0.6b", 2048),  # 2**29 logits, more than its hidden state is wide
        ("qwen3-8b", 4096),
        ("gemma-3-12b", 4096),
        ("gemma-3-27b", 4096),  # 5,376 wide
    ],
)
def test_a_slice_has_as_many_tokens_as_a_hidden_state_has_numbers(
    plan_of: PlanOf, model: str, tokens: int
) -> None:
    words = (f"model.name={model}", "cluster.name=8x8xH200", "data.seq_len=8192")
    plan = plan_of(*words)
    assert plan.decided.loss_chunk_tokens == tokens
    narrow = narrow_slice_tokens(plan.model.vocab_size, compiled=True)
    same = plan_of(*words, f"memory.loss_chunk_tokens={narrow}")
    # Wider slices take what the head's gradient takes later, but for the rounding of their size.
    if same.decided.micro_batch == plan.decided.micro_batch:
        assert plan.memory.total - same.memory.total <= 2**28


@pytest.mark.parametrize(
    ("setting", "tokens"), [("adapter.method=lora", 2048), ("memory.compile=false", 1024)]
)
def test_without_a_gradient_of_the_head_or_the_compiler_it_has_fewer(
    plan_of: PlanOf, setting: str, tokens: int
) -> None:
    plan = plan_of("model.name=qwen3-8b", "cluster.name=8xH200", "data.seq_len=4096", setting)
    assert plan.decided.loss_chunk_tokens == tokens
