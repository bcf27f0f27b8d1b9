"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardwise.config.schema import AdapterConfig
from shardwise.errors import UserError
from shardwise.files import read_json
from shardwise.model.expert_modules import find_experts
from shardwise.model.lora import adapter_params, adapters_of, whole_params
from shardwise.model.weights import portions_of

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Its names for our settings, which must be the same.
_SAME = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
# What the other fields of adapter_config.json must be for adapters to be what they are here.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_qalora": False,
    "trainable_token_indices": None,
    "layer_replication": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
# In a mixture PEFT takes target modules of these names for experts, as older transformers had them,
# and would adapt the stacks of experts in their place.
_TAKEN_FOR_EXPERTS = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
# Ways to begin that leave the model's own weights as they are; PiSSA, for example, changes them.
_OWN_STARTS = (True, False, None, "gaussian", "orthogonal")
# Fields that say where adapters are, which their names say as well, or nothing about them.
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "target_modules", "target_parameters", "exclude_modules", "lora_dropout"),
        *(
            "modules_to_save",
            "layers_pattern",
            "layers_to_transform",
            "megatron_core",
            "qalora_group_size",
        ),
    )
)


def peft_names(model: nn.Module) -> dict[str, list[str]]:
    """PEFT's names for all that is trained, by ours.

    PEFT wraps a module of experts once for each stack, the last one outermost. It copies modules
    that it trains whole, so tied ones are two there.
    """
    adapters = adapters_of(model)
    last = {weight.rpartition(".")[0]: weight for weight in adapters}
    names = {
        first: [f"{_PREFIX}{name}" for name in tied] for first, tied in whole_params(model).items()
    }
    for weight, each in adapters.items():
        module = weight.rpartition(".")[0]
        wrapped = module if weight == last[module] else f"{module}.base_layer"
        names |= {
            each.a: [f"{_PREFIX}{wrapped}.lora_A.weight"],
            each.b: [f"{_PREFIX}{wrapped}.lora_B.weight"],
        }
        if each.magnitude is not None:
            names[each.magnitude] = [f"{_PREFIX}{module}.lora_magnitude_vector"]
    return names


def to_peft(name: str, tensor: Tensor) -> Tensor:
    """A parameter as PEFT stores it: experts side by side, A by rows and B by columns."""
    if tensor.dim() < 3:
        return tensor
    if name.endswith("lora_A"):
        return tensor.reshape(-1, tensor.shape[-1])
    return tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1).contiguous()


def from_peft(name: str, stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_peft`, for a parameter of this shape."""
    if len(shape) < 3 or name.endswith("lora_A"):
        return stored.reshape(*shape)
    count, width, rank = shape
    return stored.reshape(width, rank, count).permute(2, 0, 1)


def peft_config(
    config: AdapterConfig, model: nn.Module, base: str | None, revision: str | None
) -> dict[str, Any]:
    """adapter_config.json for the adapters of a model. Each layer is named in full, so that PEFT
    adapts no other; by its weight where PEFT would take it for an expert."""
    adapters = adapters_of(model)
    has_experts = bool(find_experts(model))
    by_weight = [
        name
        for name, each in adapters.items()
        if each.is_stack or (has_experts and name.split(".")[-2] in _TAKEN_FOR_EXPERTS)
    ]
    if config.dora and by_weight:
        raise UserError(
            f"PEFT cannot load DoRA of {by_weight[0]}",
            why="in a mixture it takes layers of this name for experts, and it has no DoRA for "
            "weights that are named themselves",
            fix="write a whole model: add --merge",
        )
    layers = [name for name in adapters if name not in by_weight]
    tied = [name for names in whole_params(model).values() for name in names]
    whole = list(dict.fromkeys(name.rpartition(".")[0] for name in tied))
    return {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "init_lora_weights": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # Weights that are named themselves take none, and answers need none.
        "lora_dropout": 0.0 if by_weight else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": [name.removesuffix(".weight") for name in layers],
        "target_parameters": by_weight or None,
        "modules_to_save": whole or None,
    }


def validate_peft(directory: Path, config: AdapterConfig, model: nn.Module) -> None:
    """Raise where a directory does not hold the adapters of `model`, which may be on meta."""
    said = _read_config(directory)
    changes = [
        f"adapter.{ours}={_spelled(said.get(theirs))}"
        for ours, theirs in _SAME.items()
        if said.get(theirs, getattr(AdapterConfig(), ours)) != getattr(config, ours)
    ]
    if changes:
        raise UserError(
            f"the adapters in {directory} are not those of this configuration",
            why=f"adapter_config.json there says otherwise: {' '.join(changes)}",
            fix=f"write {' '.join(changes)}, or leave adapter.weights_from out",
        )
    stored, names = _shapes(directory), peft_names(model)
    wanted = {
        theirs: list(to_peft(name, torch.empty(param.shape, device="meta")).shape)
        for name, param in _trained(model).items()
        for theirs in names[name]
    }
    for problem in _differences(stored, wanted):
        raise UserError(
            f"{directory / WEIGHTS_NAME} does not hold the adapters of this configuration",
            why=problem,
            fix="write the adapter.targets and adapter.modules_to_save that they were trained "
            "with, or leave adapter.weights_from out",
        )
    _validate_tied(directory, names)


def load_peft(model: nn.Module, directory: Path) -> None:
    """Fill this rank's part of all that is trained."""
    names = peft_names(model)
    with _opened(directory / WEIGHTS_NAME) as file:
        for name, kept in portions_of(model, _trained(model)).items():
            kept.fill(from_peft(name, file.get_tensor(names[name][0]), kept.shape))


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    whole = {name: model.get_parameter(name) for name in whole_params(model)}
    return {**adapter_params(model), **whole}


def _validate_tied(directory: Path, names: Mapping[str, Sequence[str]]) -> None:
    """Raise where PEFT has trained tied modules apart."""
    with _opened(directory / WEIGHTS_NAME) as file:
        for first, *others in names.values():
            for other in others:
                if not torch.equal(file.get_tensor(first), file.get_tensor(other)):
                    raise UserError(
                        f"{first} and {other} differ in {directory}, and the model ties them",
                        why="PEFT trains a copy of each module that it saves",
                        fix="write model.overrides.tie_word_embeddings=false over weights that "
                        "have both, or leave adapter.weights_from out",
                    )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        said = read_json(directory / CONFIG_NAME)
    except (OSError, ValueError) as error:
        raise UserError(
            f"adapter.weights_from={directory} has no {CONFIG_NAME} that can be read",
            why=str(error),
            fix="name a directory that PEFT or `shardwise export` has written, or leave "
            "adapter.weights_from out",
        ) from error
    if not isinstance(said, dict):
        raise UserError(
            f"{directory / CONFIG_NAME} is not a mapping", fix="leave adapter.weights_from out"
        )
    for name, value in {**dict.fromkeys(_PLAIN), **said}.items():
        # Empty and absent mean the same to PEFT. A field that is not known here may change what
        # adapters are.
        is_plain = (value or None) == (_PLAIN.get(name) or None)
        if name == "init_lora_weights":
            is_plain = value in _OWN_STARTS
        if not is_plain and name not in _HARMLESS and name not in _SAME.values():
            raise UserError(
                f"the adapters in {directory} have {name}={value!r}, which is not supported yet",
                fix="leave adapter.weights_from out, or name adapters without it",
            )
    return said


def _shapes(directory: Path) -> dict[str, list[int]]:
    with _opened(directory / WEIGHTS_NAME) as file:
        keys = list(file.keys())
        return {key: list(file.get_slice(key).get_shape()) for key in keys}


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(stored.keys() - wanted.keys()):
        yield f"it has {name}, for which this run has no adapter"
    for name in sorted(wanted.keys() - stored.keys()):
        yield f"it has no {name}"
    for name, shape in wanted.items():
        if stored[name] != shape:
            yield f"{name} has shape {stored[name]}, and {shape} is needed"


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a whole file of adapters",
            why=str(error),
            fix="save the adapters anew, or leave adapter.weights_from out",
        ) from error


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
