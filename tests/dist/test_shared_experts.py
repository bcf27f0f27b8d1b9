"""Shared experts compute while tokens travel to the ranks of the others, where a block does nothing
with them but to add them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradient_runs import assert_gradients
from rank_pool import Ranks
from tiny_families import tiny_config
from tiny_runs import Settings, start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shardwise.model.expert_modules import find_experts
from shardwise.model.override import override_forward, own_forwards, surround_forward
from shardwise.model.shared_experts import SharedExperts, take_apart
from shardwise.parallel.dispatch import AllToAll
from shardwise.plan.expert import FAMILIES
from shardwise.training.session import build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
WITH_SHARED = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1"),
    *("qwen2_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
}
MESHES: dict[int, Settings] = {
    2: {"mesh.shard": 2, "mesh.expert": 2},
    4: {"mesh.shard": 4, "mesh.expert": 2},
}
HOW: dict[str, Settings] = {
    "plain": {},
    "full": {"memory.checkpoint_activations": "full"},
    "selective": {"memory.checkpoint_activations": "selective"},
    "compiled": {"memory.compile": True, "memory.checkpoint_activations": "full"},
    "bf16": {"precision.param": "bf16"},
}
SAMPLE = {("deepseek_v3", 2, "selective"), ("qwen2_moe", 4, "plain")}
GRID = [
    pytest.param(
        family, world, how, marks=[] if (family, world, how) in SAMPLE else pytest.mark.long
    )
    for family in ("deepseek_v3", "qwen2_moe")
    for world in MESHES
    for how in HOW
    if how != "bf16"
]


@pytest.mark.parametrize(("family", "world", "how"), GRID)
def test_each_gradient_is_that_of_one_process(
    ranks: Pools, tmp_path: Path, family: str, world: int, how: str
) -> None:
    mesh = world, {**MESHES[world], **HOW[how]}
    assert_gradients(ranks, family, mesh, tmp_path, with_a_width_of_its_own)


WIDTH = 40


def with_a_width_of_its_own(config: PreTrainedConfig) -> None:
    """Shared experts whose matmuls can be told from those of all other layers."""
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if hasattr(config, name):
            setattr(config, name, WIDTH)


# What a rank does for one mixture: an all-to-all starts (s) and is waited for (w), and shared
# experts multiply (m). Counts travel first, then rows and their weights, and what experts made
# comes back.
THERE, BACK = "sw ss mmm ww ", "sw "
GRADIENTS = "ss mmmmmm ww "
ORDER: dict[str, Callable[[int], str]] = {
    "plain": lambda mixtures: mixtures * (THERE + BACK) + mixtures * (BACK + GRADIENTS),
    "full": lambda mixtures: mixtures * (THERE + BACK) + mixtures * (BACK + THERE + GRADIENTS),
    "bf16": lambda mixtures: mixtures * (THERE + BACK) + mixtures * (BACK + GRADIENTS),
}


@pytest.mark.parametrize("how", ORDER)
@pytest.mark.parametrize(("family", "mixtures"), [("deepseek_v3", 1), ("qwen2_moe", 2)])
def test_they_compute_between_start_and_end_of_an_all_to_all(
    ranks: Pools, tmp_path: Path, family: str, mixtures: int, how: str
) -> None:
    """In backward too, where the same experts multiply twice as often."""
    config = tiny_config(family)
    with_a_width_of_its_own(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    place = {"model.name": str(tmp_path), "model.overrides": {}, "model.attention": "eager"}
    settings = {**place, "train.router_aux_loss": "off", "train.global_batch": 2}
    for calls in ranks(2).run(record, {**settings, **MESHES[2], **HOW[how]}):
        assert calls == ORDER[how](mixtures).replace(" ", "")


def record(settings: Settings) -> str:
    """On each rank: the calls of one forward and backward, in order."""
    session = start(2, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    batches = build_loader(session).step_batches(0)
    _, num_terms, _ = stepper._agree(batches, False)
    calls: list[str] = []

    def noted(call: Callable[..., Any], letter: str) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            calls.append(letter)
            return call(*args)

        return noting

    start_noted, finish_noted = noted(AllToAll.start, "s"), noted(AllToAll.finish, "w")
    with (
        patch.object(AllToAll, "start", start_noted),
        patch.object(AllToAll, "finish", finish_noted),
        Matmuls(calls),
    ):
        stepper._accumulate(batches, num_terms)
    return "".join(calls)


class Matmuls(TorchDispatchMode):
    """Notes the matmuls of shared experts."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and any(WIDTH in each.shape for each in args):
            self.calls.append("m")
        return func(*args, **(kwargs or {}))


# ---- where they are taken apart ---------------------------------------------------------------


def build(family: str, device: str = "meta") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")


def apart(model: nn.Module) -> dict[nn.Module, SharedExperts]:
    return take_apart(model, [each.module for each in find_experts(model)])


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_found_in_each_family_that_has_them(family: str) -> None:
    model = build(family)
    mixtures = len(find_experts(model))
    assert len(apart(model)) == (mixtures if family in WITH_SHARED else 0)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "hunyuan_v1_moe"])
def test_a_model_computes_the_same(family: str) -> None:
    """Where modules run their own code again too."""
    model = build(family, "cpu").eval()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model(tokens).logits
        found = apart(model)
        assert not torch.allclose(model(tokens).logits, expected, atol=1e-5)
        surround_forward(list(found), "Adding", adding(found))
        torch.testing.assert_close(model(tokens).logits, expected)
        with own_forwards(model):
            torch.testing.assert_close(model(tokens).logits, expected)


def adding(found: dict[nn.Module, SharedExperts]) -> Callable[..., Any]:
    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def both(self: nn.Module, x: Tensor, *choices: Tensor) -> Tensor:
            made: Tensor = forward(self, x, *choices)
            return made + found[self](x)

        return both

    return around


def routed(self: Any, hidden: Tensor) -> Tensor:
    _, weights, chosen = self.gate(hidden)
    made: Tensor = self.experts(hidden.view(-1, hidden.shape[-1]), chosen, weights)
    return made.view(hidden.shape)


def of_another_tensor(self: Any, hidden: Tensor) -> Tensor:
    return routed(self, hidden) + self.shared_experts(2 * hidden)


def twice(self: Any, hidden: Tensor) -> Tensor:
    return routed(self, hidden) + self.shared_experts(hidden) + self.shared_experts(hidden)


def after_a_norm(self: Any, hidden: Tensor) -> Tensor:
    made = routed(self, hidden)
    return made / (1 + made.square().mean(-1, keepdim=True)) + self.shared_experts(hidden)


def multiplied(self: Any, hidden: Tensor) -> Tensor:
    return routed(self, hidden) * self.shared_experts(hidden)


@pytest.mark.parametrize("forward", [of_another_tensor, twice, after_a_norm, multiplied])
def test_a_block_that_does_something_else_is_left_alone(forward: Any) -> None:
    model = build("deepseek_v3")
    mixtures = [each for each in model.modules() if hasattr(each, "shared_experts")]
    override_forward(mixtures, "Other", lambda cls: forward)
    classes = [type(module) for module in model.modules()]
    assert mixtures and not apart(model)
    assert [type(module) for module in model.modules()] == classes


def test_a_model_without_experts_is_not_asked_how_wide_it_is() -> None:
    """Some have no hidden size: BLT has one for each of its parts."""
    assert take_apart(nn.Linear(2, 2), []) == {}
