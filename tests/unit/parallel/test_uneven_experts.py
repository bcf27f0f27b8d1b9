"""Memory does not depend on how tokens spread over experts, which a plan cannot know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.parallel.expert_pass import apply_experts

EXPERTS, CHOSEN = 16, 4
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": CHOSEN},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 96},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 16},
}


def saved_bytes(family: str, way: str, *, crowded: bool) -> tuple[int, int]:
    """(what a forward saves, the tokens of the fullest expert)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    experts = "grouped_mm" if way == "own" else way
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    fullest: list[int] = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            weight = module.weight.data
            # With equal scores the first experts get all tokens.
            weight.zero_() if crowded else weight.normal_()
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args: fullest.append(int(args[1].flatten().bincount().max()))
            )
    if way == "own":
        apply_experts([model.model.layers[0]])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.randint(0, 64, (2, 128)))
    sizes = {key: t.untyped_storage().nbytes() for key, t in seen.items() if key not in weights}
    return sum(sizes.values()), fullest[-1]


@pytest.mark.parametrize("way", ["own", "grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_at_a_few_experts_saves_as_much_as_an_even_spread(family: str, way: str) -> None:
    even, fullest = saved_bytes(family, way, crowded=False)
    crowded, crowd = saved_bytes(family, way, crowded=True)
    assert fullest < 256 == crowd  # every token is at the same experts
    assert crowded == even
