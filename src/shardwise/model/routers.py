"""The routers of a mixture of experts, found where transformers itself looks for them.

A family names the modules that return router logits in `_can_record_outputs["router_logits"]`, for
`output_router_logits`. No public function gives these modules, so this file walks the model as
transformers does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UserError
from shardwise.internals.hugging_face import router_outputs

# The arguments of transformers' `load_balancing_loss_func`, whose value ours equals.
_USUAL_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
# Layers that choose experts, by the last part of their names. Small differences decide there.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "wg"})
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class NoRouters(Exception):
    """Why no load-balancing loss can be computed for a model."""


class OnlyDenseLayers(NoRouters):
    """A mixture's class, configured so that none of its layers has experts: the loss is 0."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The modules that return router logits."""

    indices: dict[nn.Module, tuple[int, ...]]
    """For each module, where the logits are in the tuple that it returns."""

    top_k: int
    """Experts that a token goes to."""


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """What a plan needs to know."""

    num_routers: int
    asked: float | None
    """The coefficient of the loss that the model's own forward adds; None where it adds none."""

    why_none: str
    """Why there is no router that a loss can be computed for; empty where there is one."""


def describe_routers(model: PreTrainedModel) -> RouterFacts:
    """The routers of a model that may be on meta, and the loss that its config asks for."""
    asks = bool(getattr(model.config, "output_router_logits", False))
    asked = _coefficient(model) if asks and _own_loss(model) is not None else None
    try:
        routers = find_routers(model)
    except OnlyDenseLayers as error:
        return RouterFacts(0, None, str(error))
    except NoRouters as error:
        return RouterFacts(0, asked, str(error))
    return RouterFacts(len(routers.indices), asked, "")


def find_routers(model: PreTrainedModel) -> Routers:
    """All routers, or NoRouters with the reason."""
    own_loss = _own_loss(model)
    if own_loss is not None and list(inspect.signature(own_loss).parameters) != _USUAL_ARGUMENTS:
        raise NoRouters("its load-balancing loss is not the usual one of transformers")
    indices: dict[nn.Module, tuple[int, ...]] = {}
    for module, index in _recorded(model, ""):
        indices[module] = (*indices.get(module, ()), index)
    if not indices and any(map(router_outputs, model.modules())):
        raise OnlyDenseLayers("none of its layers has a router")
    if not indices:
        raise NoRouters("transformers finds no router in it")
    top_k = getattr(model, "num_experts_per_tok", None)
    if top_k is None:
        top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise NoRouters(
            "its config does not say in num_experts_per_tok how many experts a token has"
        )
    return Routers(indices, top_k)


def _own_loss(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The function by which the family's own forward computes its load-balancing loss."""
    found = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    return found if callable(found) else None


def _coefficient(model: PreTrainedModel) -> float:
    """What the family's own forward multiplies the loss with."""
    for holder in (model, model.config.get_text_config()):
        for name in _COEFFICIENTS:
            value = getattr(holder, name, None)
            if value is not None:
                return float(value)
    raise UserError(
        "config.json asks for a load-balancing loss without its coefficient",
        why="output_router_logits is true, and router_aux_loss_coef is missing",
        fix="write model.overrides={router_aux_loss_coef: 0.001}, or output_router_logits: false",
    )


def _recorded(model: PreTrainedModel, name: str) -> Iterator[tuple[nn.Module, int]]:
    """Modules that record router logits. Each PreTrainedModel inside names its own."""
    yield from _walk(model, name, router_outputs(model))


def _walk(parent: nn.Module, name: str, specs: Sequence[Any]) -> Iterator[tuple[nn.Module, int]]:
    for child_name, child in parent.named_children():
        inner = f"{name}.{child_name}"
        if isinstance(child, PreTrainedModel):
            yield from _recorded(child, inner)
        else:
            yield from _walk(child, inner, specs)
    for spec in specs:
        if _matches(spec, parent, name):
            # A bare class or name means the second output, as in transformers.
            yield parent, getattr(spec, "index", 1)


def _matches(spec: Any, module: nn.Module, name: str) -> bool:
    """Whether a spec means this module: by its class or the end of its name, and by its layer."""
    target = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
    suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
    of_class = target is not None and isinstance(module, target)
    of_name = suffix is not None and name.endswith(suffix)
    layer = getattr(spec, "layer_name", None)
    return (of_class or of_name) and (layer is None or f".{layer.strip('.')}." in f"{name}.")
