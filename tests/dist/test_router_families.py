"""Each family whose forward has a load-balancing loss: ours is that one, and changes no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import Ranks
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.parallel.mesh import World
from shardwise.training.balance import Balance, watch_routers

pytestmark = pytest.mark.dist

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN = {
    "num_experts": 6,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16},
    "flex_olmo": {"num_experts": 6},
    "flint": {"num_experts": 6, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8},
    "granitemoe": {"num_local_experts": 6},
    "granitemoe_swa": {"num_local_experts": 6},
    "granitemoehybrid": {
        "num_local_experts": 6,
        "layer_types": ["attention", "mamba"] * 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "granitemoeshared": {"num_local_experts": 6, "shared_intermediate_size": 32},
    "jamba": {
        "num_experts": 6,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
    },
    "jetmoe": {"num_local_experts": 6, "kv_channels": 8},
    "laguna": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8},
    "mellum": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8},
    "minimax": {"num_local_experts": 6, "block_size": 8, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 6, "head_dim": 8, "rotary_dim": 8},
    "minimax_m3_vl_text": {"num_local_experts": 6, "head_dim": 8},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6},
    "phimoe": {"num_local_experts": 6},
    "qwen2_moe": QWEN,
    "qwen3_5_moe_text": {**QWEN, **LINEAR_ATTENTION},
    "qwen3_moe": QWEN,
    "qwen3_next": {**QWEN, **LINEAR_ATTENTION},
}
# Routers in attention too, in some of the layers, and found by the name of their layer.
SAMPLE = ("jetmoe", "jamba", "minimax")


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in SAMPLE else pytest.mark.long) for each in FAMILIES],
)
def test_it_is_the_family_s_own(ranks: Callable[[int], Ranks], family: str) -> None:
    try:
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    own, ours = ranks(1).run(both_losses, config)[0]
    assert ours == pytest.approx(own, rel=1e-5)


def both_losses(config: Any) -> tuple[list[float], list[float]]:
    """Value and gradient norm of the family's own loss, and of ours."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.eval()
    with torch.no_grad():
        for param in model.parameters():  # routers that begin at zero would choose by chance
            param.add_(torch.randn_like(param), alpha=0.05)
    ids = torch.randint(0, config.vocab_size, (2, 16))
    out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    own = [out.aux_loss.item(), norm_of(model, out.aux_loss)]
    watch_routers(model)
    balance = Balance(model, World.joined().group)
    with balance.watching() as logits:
        again = model(input_ids=ids, use_cache=False)
    assert torch.equal(out.logits, again.logits)
    part, routing = balance.over_ranks(logits)
    assert part.aux_loss is not None and routing.aux_loss is not None
    return own, [routing.aux_loss.item(), norm_of(model, part.aux_loss)]


def norm_of(model: Any, loss: torch.Tensor) -> float:
    model.zero_grad()
    loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.nn.utils.get_total_norm(grads).item()
