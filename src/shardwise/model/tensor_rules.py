"""How the parameters of a family's blocks are divided over ranks that compute them together.

transformers' configs name the layers of a block that are divided by their outputs (`colwise`) or
by their inputs (`rowwise`). gpt-oss has no such plan, and DeepSeek-V3's leaves attention whole, so
rules for these are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UserError
from shardwise.model.lora import Lora


@dataclass(frozen=True, slots=True)
class Division:
    """How one parameter is divided."""

    dim: int
    stacked: int = 1
    """Matrices that lie one after the other along it, each of which is divided."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters of all blocks, by name."""

    divided: dict[str, Division]
    added_once: frozenset[str]
    """Biases that are added to a sum over ranks."""


# What transformers says of layers whose parameters every rank keeps.
_KEPT_WHOLE = ("replicated_with_grad_allreduce", "moe_tp_experts", "mla_kv_a_proj", "gather")
_LINEAR: dict[str, dict[str, Division | None]] = {
    "colwise": {"weight": Division(0), "bias": Division(0)},
    "packed_colwise": {"weight": Division(0, 2), "bias": Division(0, 2)},
    "rowwise": {"weight": Division(1), "bias": None},
}
# An adapter's narrow result is a part of a sum where its layer's result is. Every rank keeps the
# side of it that has the width of the model.
_LORA: dict[str, dict[str, Division | None]] = {
    "colwise": {"lora_B": Division(0)},
    "packed_colwise": {"lora_B": Division(0, 2)},
    "rowwise": {"lora_A": Division(1)},
}
# Stacks of experts are (experts, out, in).
_STACK = {"colwise": Division(1), "packed_colwise": Division(1, 2), "rowwise": Division(2)}
_HEADS = {f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")}
_OUT = {"layers.*.self_attn.o_proj": "rowwise"}
# Heads read what the ranks have alike: latent vectors, and the part of keys with positions.
_LATENT = {f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "q_b", "kv_b")}
_EXPERTS = "layers.*.mlp.experts."
# Its stacks are (experts, in, out), and gate and up take turns.
_GPT_OSS: dict[str, str | Division | None] = {
    **_HEADS,
    **_OUT,
    "layers.*.self_attn.sinks": Division(0),
    f"{_EXPERTS}gate_up_proj": Division(2),
    f"{_EXPERTS}gate_up_proj_bias": Division(1),
    f"{_EXPERTS}down_proj": Division(1),
    f"{_EXPERTS}down_proj_bias": None,
}


def find_layout(model: PreTrainedModel) -> Layout:
    """The division of all blocks of a model. It must not be divided yet."""
    rules = _rules(model)
    base = model.get_submodule(getattr(model, "base_model_prefix", ""))
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    divided: dict[str, Division] = {}
    once: set[str] = set()
    for name, module in base.named_modules():
        rule = rules.get(_pattern(name))
        if isinstance(rule, str) and isinstance(module, nn.Linear):
            parts = _LINEAR[rule] | (_LORA[rule] if isinstance(module, Lora) else {})
            for own, _ in module.named_parameters(recurse=False):
                if own in parts:
                    _note(f"{prefix}{name}.{own}", parts[own], divided, once)
        for own, param in module.named_parameters(recurse=False):
            full = f"{name}.{own}"
            if (pattern := _pattern(full)) in rules:
                found = rules[pattern]
                division = _STACK[found] if isinstance(found, str) else found
                if division is not None and division.dim >= param.dim():
                    raise _unknown(model, f"{full} has {param.dim()} dims")
                _note(f"{prefix}{full}", division, divided, once)
    if not divided:
        raise _unknown(model, "transformers has no plan for it")
    return Layout(divided, frozenset(once))


def _note(
    name: str, division: Division | None, divided: dict[str, Division], once: set[str]
) -> None:
    if division is None:
        once.add(name)
    else:
        divided[name] = division


def _rules(model: PreTrainedModel) -> Mapping[str, str | Division | None]:
    config: Any = model.config
    if config.model_type == "gpt_oss":
        return _GPT_OSS
    plan = dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})
    if config.model_type == "deepseek_v3":
        plan |= _LATENT | _OUT
    rules = {name: style for name, style in plan.items() if style not in _KEPT_WHOLE}
    if unknown := sorted(set(rules.values()) - _LINEAR.keys()):
        raise _unknown(model, f"its plan has the style {unknown[0]!r}")
    return rules


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _unknown(model: PreTrainedModel, why: str) -> UserError:
    return UserError(
        f"mesh.tensor does not divide {model.config.model_type} models",
        why=why,
        fix="write mesh.tensor=1",
    )
