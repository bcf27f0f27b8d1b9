"""Whether a checkpoint holds exactly the tensors of its model: names, shapes and dtypes.

Hashes show that files belong together. Whoever can write files can compute their hashes again, so
the tensors are compared with the model too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from shardwise.checkpoint.index import Index, StoredTensor, read_index
from shardwise.checkpoint.manifest import INDEX_NAME, PLAN_NAME, Damaged
from shardwise.checkpoint.own_plan import read_own_plan, wants_own_code
from shardwise.checkpoint.site_tensors import is_of_sites, without_site
from shardwise.checkpoint.state import saved_tensors
from shardwise.config.schema import AdapterConfig
from shardwise.config.typed import validate_types
from shardwise.errors import ExitCode, UserError, printable
from shardwise.model.build import build_on_meta
from shardwise.model.lora import apply_lora
from shardwise.model.weights import Portion

_STATE = "optim.state."
# Adam's moments may be fp32 or bf16, and a run may change from one to the other.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_FACTORS = ("row_var", "col_var")
_MOST_NAMED = 5


class NotCompared(Exception):
    """Why a checkpoint's tensors were not compared."""


def check_structure(path: Path) -> list[Damaged]:
    """What is wrong with the tensors of a checkpoint whose bytes are good, by its own plan.

    Raises NotCompared where that would take the model's own code, which is never run here.
    """
    plan = read_own_plan(path)
    if wants_own_code(plan):
        raise NotCompared("its model has code of its own, which is not run here")
    if str(plan["hf_config"].get("model_type")) not in CONFIG_MAPPING:
        raise NotCompared("transformers does not know its model")
    try:
        # Nothing is computed, so `eager`, which every family has, will do.
        model = build_on_meta(plan["hf_config"], attention="eager")
        apply_stored_adapters(model, plan["config"])
    except UserError as error:
        return [Damaged(PLAN_NAME, f"describes no model: {error.why or error.what}")]
    except Damaged as damage:
        return [damage]
    return check_model(read_index(path), model)


def apply_stored_adapters(model: PreTrainedModel, config: Mapping[str, Any]) -> None:
    """Give a model on meta the adapters that the configuration in a checkpoint names."""
    adapter = stored_adapter(config)
    if adapter.method != "none":
        # The dtype of frozen weights is that of the run, and no part of the checkpoint.
        apply_lora(model, adapter, torch.float32)


def stored_adapter(config: Mapping[str, Any]) -> AdapterConfig:
    """The adapter section of the configuration in a checkpoint, or Damaged. A field that this
    version does not know is left out."""
    said = config.get("adapter", {})
    known = {item.name for item in fields(AdapterConfig)}
    try:
        adapter = AdapterConfig(**{name: said[name] for name in said if name in known})
        validate_types(adapter, AdapterConfig, "adapter")
    except (TypeError, LookupError) as error:
        raise Damaged(PLAN_NAME, f"names no adapters: {error}") from error
    return adapter


def check_model(index: Index, model: PreTrainedModel) -> list[Damaged]:
    """What differs between a checkpoint and a model. Adam's state is compared with its
    parameters."""
    params = dict(model.named_parameters(remove_duplicate=False))
    wanted = saved_tensors(model)
    of_sites = {name: tensor for name, tensor in index.items() if is_of_sites(name)}
    state = {name: tensor for name, tensor in index.items() if name.startswith(_STATE)}
    rest = {n: tensor for n, tensor in index.items() if n not in state and n not in of_sites}
    faults = [
        *_differences(rest, wanted),
        *_state_faults(state, params),
        *_site_faults(of_sites, wanted, params),
    ]
    return [Damaged(INDEX_NAME, fault) for fault in faults]


def check_tensors(index: Index, live: Mapping[str, Portion]) -> list[Damaged]:
    """What differs between a checkpoint and the tensors that it is to fill."""
    return [Damaged(INDEX_NAME, fault) for fault in _differences(index, live)]


def refuse_tensors(path: Path, wrong: list[Damaged]) -> UserError:
    """The error for tensors that differ from the model's."""
    more = len(wrong) - _MOST_NAMED
    shown = "".join(f"\n    {printable(str(damage))}" for damage in wrong[:_MOST_NAMED])
    return UserError(
        f"{path} does not hold the model that its plan describes:{shown}"
        + (f"\n    and {more} more" if more > 0 else ""),
        why="its hashes are right, so another program has altered it, or the installed "
        "transformers uses other tensor names than the version in manifest.json",
        fix=f"set it aside, to use the one before it: mv {quote(str(path))} "
        f"{quote(str(path.with_name('quarantined-' + path.name)))}; or restore it from a backup",
        code=ExitCode.VERIFY_FAILED,
    )


def _differences(
    index: Index, wanted: Mapping[str, Tensor] | Mapping[str, Portion]
) -> Iterator[str]:
    for name in wanted:
        if name not in index:
            yield f"{name} is missing"
    for name, stored in index.items():
        if name not in wanted:
            yield f"{name} is no tensor of the model"
            continue
        tensor = wanted[name]
        if stored.shape != tuple(tensor.shape):
            yield f"{name} has shape {list(stored.shape)}, the model's is {list(tensor.shape)}"
        elif stored.dtype != tensor.dtype and not _may_be_cast(name, stored, tensor):
            yield f"{name} is {_dtype(stored)}, the model's is {_dtype(tensor)}"


def _may_be_cast(name: str, stored: StoredTensor, tensor: Tensor | Portion) -> bool:
    floats = stored.dtype.is_floating_point and tensor.dtype.is_floating_point
    return floats and name.startswith(_STATE) and name.endswith(_MOMENTS)


def _state_faults(state: Index, params: Mapping[str, Tensor]) -> Iterator[str]:
    for name, stored in state.items():
        owner, _, _ = name.removeprefix(_STATE).rpartition(".")
        if owner not in params:
            yield f"{name} is the state of no parameter"
        elif name.endswith("_scale") and stored.shape[:-1] == tuple(params[owner].shape[:-1]):
            continue  # of blocks of a row
        elif name.endswith(_FACTORS) and _is_factor(stored.shape, tuple(params[owner].shape)):
            continue
        elif stored.shape not in ((), tuple(params[owner].shape)):
            yield (
                f"{name} has shape {list(stored.shape)}, its parameter's is "
                f"{list(params[owner].shape)}"
            )


def _is_factor(stored: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a shape is that of Adafactor's numbers for the rows or the columns of a matrix."""
    return stored in ((*whole[:-1], 1), (*whole[:-2], 1, whole[-1]))


def _site_faults(
    of_sites: Index, wanted: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> Iterator[str]:
    """What differs in the tensors that each of several sites has of its own."""
    for name, stored in of_sites.items():
        common = without_site(name)
        if common.startswith(_STATE):
            yield from (f"{name}: {fault}" for fault in _state_faults({common: stored}, params))
        elif common not in wanted:
            yield f"{name} is no tensor of the model"
        elif stored.shape != tuple(wanted[common].shape):
            shape = list(wanted[common].shape)
            yield f"{name} has shape {list(stored.shape)}, the model's is {shape}"


def _dtype(tensor: StoredTensor | Tensor | Portion) -> str:
    return str(tensor.dtype).removeprefix("torch.")
