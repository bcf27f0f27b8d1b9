"""Tokens are counted where experts get them, in every family with a module of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.model.expert_modules import find_experts
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.training.expert_load import (
    ExpertCounter,
    TokenCounts,
    load_of,
    summed,
    watch_experts,
)
from shardwise.training.objective import NextToken
from shardwise.training.passes import OneByOne
from shardwise.training.session import attach_training_loss, build_loader, build_session

MakePlan = Callable[..., Plan]
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"vocab_size": 301, "num_experts_per_tok": 2, "pad_token_id": 0},
}
# A softmax before and after the choice, and a sigmoid with a bias and groups.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6},
}
IDS = torch.randint(301, (2, 16), generator=torch.Generator().manual_seed(0))


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_of_what_the_routers_chose(family: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    chosen: list[Tensor] = []

    def note(output: Any) -> None:
        if isinstance(output, tuple):
            chosen.append(output[2])

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("gate", "router"):
            torch.nn.init.normal_(module.weight)
            module.register_forward_hook(lambda module, args, output: note(output))
    watch_experts(model)
    with ExpertCounter(model, torch.device("cpu")).counting() as found:
        model(input_ids=IDS, use_cache=False)
    (counts,) = found
    expected = [each.flatten().bincount(minlength=counts.num_experts[0]) for each in chosen]
    # Routers of older releases leave DeepSeek's choice to the block.
    assert counts.tokens[:, :-1].tolist() == [each.tolist() for each in expected] or not chosen
    assert set(counts.tokens.sum(1).tolist()) == {2 * IDS.numel()}
    assert counts.tokens[:, -1].sum() == 0
    model(input_ids=IDS, use_cache=False)
    assert all(each.module.seen_experts is None for each in find_experts(model))


@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_nothing_is_counted_twice(lone_plan: MakePlan, tmp_path: Path, remat: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral").to_dict()))
    words = ("train.global_batch=4", "train.micro_batch=2", f"model.name={tmp_path}")
    plan = lone_plan(*words, f"memory.checkpoint_activations={remat}")
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach_training_loss(session, lambda text: None)
    passes = OneByOne(session.model, plan, None, lambda phase: None, NextToken())
    batches = build_loader(session).step_batches(0)
    passed = passes.forward_backward(batches, torch.tensor(1), 1.0)
    assert passed.experts is not None
    # Each of four sequences of 32 tokens chooses two experts in each of two blocks.
    assert passed.experts.tokens.sum(1).tolist() == [4 * 32 * 2] * 2


def test_a_dense_model_has_no_counts(lone_plan: MakePlan) -> None:
    plan = lone_plan()
    session = build_session(plan, build_mesh(plan), lambda text: None)
    with ExpertCounter(session.model, session.device).counting() as found:
        pass
    assert found == [] and summed(found) is None


def test_a_load_is_over_all_blocks(lone_plan: MakePlan) -> None:
    del lone_plan  # Its process group has one rank.
    even, uneven, unused = [4, 4, 4, 4, 0], [8, 4, 4, 0, 3], [0, 0, 0, 0, 0]
    counts = TokenCounts(torch.tensor([even, uneven, unused]), (4, 4, 4))
    group = dist.group.WORLD
    assert group is not None
    load = load_of(counts, group)
    assert (load.most, load.least, load.dropped) == (2.0, 0.0, 3)
    assert load.entropy == pytest.approx((1 + 0.75) / 2)
