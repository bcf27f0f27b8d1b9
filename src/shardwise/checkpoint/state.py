"""The tensors of model and optimizer that a checkpoint holds, by name. Each rank holds its own
shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardwise.model.cuts import cuts_of
from shardwise.model.lora import adapters_of
from shardwise.model.weights import Portion
from shardwise.parallel.torchao_float8 import bare

# One flat name per tensor, so that any mesh can read what any other wrote.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under `model.`. A tied tensor appears once, by its first
    name.

    Float8 weights are stored unwrapped, so runs with and without float8 read each other's
    checkpoints.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    first = {id(param): name for name, param in reversed(params.items())}
    aliases = {name for name, param in params.items() if first[id(param)] != name}
    state = model.state_dict()
    return {f"model.{name}": bare(tensor) for name, tensor in state.items() if name not in aliases}


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint keeps of the model: all of it, or what is trained where the rest is under
    adapters.

    Weights under adapters are read again from where they came from. Those that a family freezes by
    itself, such as a table of positions, are a part of the model and of its export.
    """
    tensors = model_tensors(model)
    if not adapters_of(model):
        return tensors
    params = dict(model.named_parameters(remove_duplicate=False))
    trained = {f"model.{name}" for name, param in params.items() if param.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name in trained}


def kept_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Portion]:
    """What this rank keeps of each tensor of a checkpoint, by its name there. Adam's moments are
    cut as their parameters are."""
    cuts = {}
    for name, cut in cuts_of(model).items():
        cuts[f"model.{name}"] = cut
        cuts |= {f"optim.state.{name}.{moment}": cut for moment in _MOMENTS}
    return {name: Portion(tensor, cuts.get(name)) for name, tensor in tensors.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's moments and step counts under `optim.`. Settings come from the plan, not from the
    file."""
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
    return {f"optim.{name}": value for name, value in state.items() if isinstance(value, Tensor)}


def set_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put loaded optimizer tensors back."""
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
    loaded: dict[str, Any] = {name.removeprefix("optim."): value for name, value in tensors.items()}
    set_optimizer_state_dict(model, optimizer, {**state, **loaded}, options=_FLAT)
