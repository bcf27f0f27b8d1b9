"""Which layers multiply in float8, and how near they come to the plain path."""

from __future__ import annotations

import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.plain import config_from_dict
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan
from shardwise.model.blocks import Unit, UnitMap, find_units
from shardwise.model.build import build_on_meta
from shardwise.parallel.torchao_float8 import (
    Layer,
    apply_float8,
    float8_layers,
    take_own_arithmetic,
)
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.training.model_lines import float8_table, unit_table

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
}


def plan_of(model: str, linear: str, *, overrides: Any = None, **precision: Any) -> Plan:
    """For GPUs, and then as the CPU here emulates them."""
    config = config_from_dict(
        {
            "model": {"name": model, "overrides": overrides or {}},
            "data": {"source": "synthetic", "seq_len": 32},
            "cluster": {"name": "8xH200"},
            "shard": {"strategy": "full_shard"},
            "precision": {"linear": linear, **precision},
        }
    )
    plan = choose_plan(config, {})
    return replace(plan, cluster=replace(plan.cluster, device="cpu"))


def layers_of(model: str, linear: str = "float8", **precision: Any) -> tuple[list[Layer], Plan]:
    plan = plan_of(model, linear, **precision)
    built = build_on_meta(plan.hf_config)
    return float8_layers(built, find_units(built), plan), plan


# ---- which ------------------------------------------------------------------------------------


def test_all_linear_layers_of_large_blocks_and_nothing_else() -> None:
    layers, plan = layers_of("llama-3.1-8b")
    changed = [layer for layer in layers if layer.why_not is None]
    kinds = Counter(layer.name.split(".")[-1] for layer in changed)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert kinds == dict.fromkeys(names, 32)
    assert all(layer.gathers_float8 for layer in changed)
    assert float8_table(layers, plan) == [
        "224 of 225 linear layers multiply in float8 (one scale per tensor), and 224 are gathered "
        "in it",
        "  bf16: 1 x lm_head (outside the blocks)",
    ]


def test_narrow_layers_stay_unless_they_are_let_in() -> None:
    layers, plan = layers_of("llama-3.2-1b")
    assert {layer.name.split(".")[-1] for layer in layers if layer.why_not} == {
        "k_proj", "v_proj", "lm_head",
    }  # fmt: skip
    assert (
        "  bf16: 16 x k_proj (2048 x 512 is below precision.float8_min_features=1024)"
        in float8_table(layers, plan)
    )
    layers, _ = layers_of("llama-3.2-1b", float8_min_features=512)
    assert [layer.name for layer in layers if layer.why_not] == ["lm_head"]


def test_stacked_experts_stay_and_are_named() -> None:
    layers, plan = layers_of("mixtral-8x7b")
    assert Counter(layer.why_not for layer in layers) == {
        None: 4 * 32,
        "stacked in one tensor": 2 * 32,
        "outside the blocks": 1,
    }
    assert any("32 x gate_up_proj (stacked in one tensor)" in x for x in float8_table(layers, plan))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(1024, 2048)
        self.lora_A = nn.Linear(1024, 1024)
        self.odd = nn.Linear(1024, 1032)
        self.up = nn.Linear(1024, 4096)


def test_routers_lora_and_odd_shapes_stay() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
    units = find_units(model, classes=["Block"])
    plan = plan_of("llama-3.1-8b", "float8")
    reasons = {x.name: x.why_not for x in float8_layers(model, units, plan) if ".0." in x.name}
    assert reasons == {
        "layers.0.gate": "a router",
        "layers.0.lora_A": "a LoRA layer",
        "layers.0.odd": "1024 x 1032 is no multiple of 16",
        "layers.0.up": None,
    }


def test_rows_that_do_not_divide_are_gathered_as_ever() -> None:
    plan = plan_of("llama-3.1-8b", "float8")
    built = build_on_meta(plan.hf_config)
    units = find_units(built)
    # Of 4096, 1024 and 14336 rows only the last divide.
    plan = plan.with_choices(shard=Choice(7, "", "rule"))
    found = [x for x in float8_layers(built, units, plan) if x.why_not is None]
    gathered = {x.name.split(".")[-1] for x in found if x.gathers_float8}
    assert gathered == {"gate_proj", "up_proj"}


def test_the_unit_table_counts_a_byte_for_each_weight() -> None:
    plan = plan_of("llama-3.1-8b", "float8")
    built = build_on_meta(plan.hf_config)
    units = find_units(built)
    block = next(line for line in unit_table(units, plan, float8_layers(built, units, plan))
                 if "layers.0" in line)  # fmt: skip
    assert block.endswith("gathers 208.0 MiB")
    assert "416.0 MiB" in unit_table(units, plan)[2]


def test_without_float8_nothing_is_listed_or_changed() -> None:
    plan = plan_of("tiny-llama", "auto")
    built = build_on_meta(plan.hf_config)
    units = find_units(built)
    before = [type(module) for module in built.modules()]
    apply_float8(built, units, plan)
    assert [type(module) for module in built.modules()] == before
    assert float8_layers(built, units, plan) == float8_table([], plan) == []


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.torchao
def test_a_model_without_such_layers_is_refused() -> None:
    plan = plan_of("gpt2", "float8")
    built = build_on_meta(plan.hf_config)
    with pytest.raises(UserError, match="changes no layer of GPT2LMHeadModel") as caught:
        apply_float8(built, find_units(built), plan)
    assert "outside the blocks" in caught.value.why


def test_torchao_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match="needs torchao, which is not installed") as caught:
        apply_float8(nn.Module(), UnitMap((), 0, ""), plan_of("llama-3.1-8b", "float8"))
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert "pip install 'shardwise[float8]'" in caught.value.fix


@pytest.mark.torchao
def test_a_gpu_that_is_older_than_the_plan_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("llama-3.1-8b", "float8")
    plan = replace(plan, cluster=replace(plan.cluster, device="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UserError, match="NVIDIA A100 does not compute float8"):
        apply_float8(nn.Module(), UnitMap((), 0, ""), plan)


# ---- numbers ----------------------------------------------------------------------------------


def error(rough: Tensor, exact: Tensor) -> float:
    return float((rough - exact).norm() / exact.norm())


def gradients(linear: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a small llama whose weights are as large as trained ones."""
    plan = plan_of("tiny-llama", linear, overrides=SMALL, param="fp32", float8_min_features=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plan.hf_config))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0.0, 0.08)
    apply_float8(model, find_units(model), plan)
    ids = torch.arange(128).view(4, 32)
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits.flatten(0, 1), (7 * ids % 272).flatten()).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert None not in grads.values()
    return logits.detach(), grads  # type: ignore[return-value]


@pytest.mark.torchao
@pytest.mark.parametrize("linear", ["float8", "float8_rowwise"])
def test_a_small_llama_within_the_errors_of_float8(linear: str) -> None:
    """One matmul of eight bits is off by about 4%; a dozen in a row add up to some 10%."""
    exact, exact_grads = gradients("param")
    rough, rough_grads = gradients(linear)
    assert 0.01 < error(rough, exact) < 0.15
    assert rough_grads.keys() == exact_grads.keys()
    for name, grad in exact_grads.items():
        assert 0.01 < error(rough_grads[name], grad) < 0.25, name


@pytest.mark.torchao
@pytest.mark.parametrize(("linear", "bound"), [("float8", 0.08), ("float8_rowwise", 0.06)])
def test_one_layer_within_the_errors_of_float8(linear: str, bound: float) -> None:
    """Three bits of mantissa round by 2.6% on average, gradients with two bits by 5%."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 512, bias=False)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(layer), nn.Sequential()])})
    plan = plan_of("llama-3.1-8b", linear).with_choices(float8_gather=Choice(False, "", "rule"))
    precision = replace(plan.config.precision, float8_min_features=16)
    plan = replace(plan, config=replace(plan.config, precision=precision))
    inputs, coming = torch.randn(64, 256, requires_grad=True), torch.randn(64, 512)

    def run(module: nn.Module) -> list[Tensor]:
        inputs.grad = None
        outputs = module(inputs)
        outputs.backward(coming)
        weight = next(module.parameters())
        found = [outputs.detach(), inputs.grad.clone(), weight.grad.clone()]  # type: ignore[union-attr]
        weight.grad = None
        return found

    exact = run(layer)
    units = UnitMap((Unit("layers.0", ("layers.0",), layer.weight.numel(), True),), 0, "")
    apply_float8(model, units, plan)
    rough = run(model["layers"][0])  # type: ignore[index]
    assert type(model["layers"][0][0]) is not nn.Linear  # type: ignore[index]
    assert 0.02 < error(rough[0], exact[0]) < 0.05
    for found, wanted in zip(rough[1:], exact[1:], strict=True):
        assert 0.02 < error(found, wanted) < bound


# ---- our arithmetic against torchao's ---------------------------------------------------------


class Gated(nn.Module):
    """An MLP of Llama's kind behind two layers, the first with a bias."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.attention = nn.Module()
        self.attention.o_proj = nn.Linear(64, 64, bias=False)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(64, 128, bias=False)
        self.mlp.up_proj = nn.Linear(64, 128, bias=False)
        self.mlp.down_proj = nn.Linear(128, 64, bias=False)
        self.mlp.act_fn = activation
        self.mlp.__class__ = MLP

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.attention.o_proj(self.q_proj(x)))  # type: ignore[operator]
        return y


class MLP(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


LAYERS = {"q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def both_arithmetics(activation: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The same model with our layers and with torchao's."""
    torch.manual_seed(0)
    ours = Gated(activation)
    convert_layers(ours)
    theirs = deepcopy(ours)
    take_own_arithmetic(ours, LAYERS)
    return ours, theirs


def convert_layers(model: nn.Module) -> None:
    """By torchao, in emulation."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)


def numbers(model: nn.Module, call: Any = None) -> list[Tensor]:
    """The output, and all gradients."""
    torch.manual_seed(1)
    x = torch.randn(2, 32, 64, requires_grad=True)
    y = (model if call is None else call)(x)
    y.backward(torch.randn(2, 32, 64))
    assert x.grad is not None
    found = [y.detach(), x.grad, *(param.grad for param in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.torchao
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()])
def test_the_numbers_are_torchaos(activation: nn.Module) -> None:
    ours, theirs = both_arithmetics(activation)
    # An MLP with another activation stays three layers.
    assert type(ours.mlp).__name__ == ("Float8MLP" if isinstance(activation, nn.SiLU) else "MLP")
    for one, other in zip(numbers(ours), numbers(theirs), strict=True):
        # The product inside an MLP is not rounded to bf16 here: rarely it casts otherwise.
        assert error(one, other) < 1e-3


class ScaledMLP(MLP):
    """As Falcon H1 has it: the same layers, another function."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(0.5 * self.gate_proj(x)) * self.up_proj(x))
        return y


@pytest.mark.torchao
def test_an_mlp_that_computes_something_else_stays_three_layers() -> None:
    torch.manual_seed(0)
    plain = Gated(nn.SiLU())
    plain.mlp.__class__ = ScaledMLP
    ours = deepcopy(plain)
    convert_layers(ours)
    take_own_arithmetic(ours, LAYERS)
    assert type(ours.mlp) is ScaledMLP
    assert error(numbers(ours)[0], numbers(plain)[0]) < 0.1


@pytest.mark.torchao
def test_the_mlps_of_llama_are_taken_and_what_follows_its_attention() -> None:
    plan = plan_of("tiny-llama", "float8", overrides=SMALL, param="fp32", float8_min_features=16)
    model = build_on_meta(plan.hf_config)
    apply_float8(model, find_units(model), plan)
    mlps = [type(m).__name__ for name, m in model.named_modules() if name.endswith(".mlp")]
    assert mlps == ["Float8LlamaMLP"] * 2
    own = {n.split(".")[-1] for n, m in model.named_modules() if "OwnOutput" in type(m).__name__}
    assert own == {"o_proj"}


@pytest.mark.torchao
def test_the_compiler_gives_the_same_numbers_in_one_graph() -> None:
    ours, _ = both_arithmetics(nn.SiLU())
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for one, other in zip(numbers(ours, compiled), numbers(ours), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.torchao
def test_a_frozen_weight_gets_no_gradient() -> None:
    ours, theirs = both_arithmetics(nn.SiLU())
    for model in (ours, theirs):
        model.mlp.up_proj.weight.requires_grad_(False)  # type: ignore[union-attr]
        model.q_proj.requires_grad_(False)  # type: ignore[operator]
    x = torch.randn(32, 64, requires_grad=True)
    ours(x).sum().backward()
    assert ours.mlp.up_proj.weight.grad is None and ours.q_proj.weight.grad is None  # type: ignore[union-attr]
    assert ours.mlp.gate_proj.weight.grad is not None  # type: ignore[union-attr]
