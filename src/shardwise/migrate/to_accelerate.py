"""Our configuration as an Accelerate file: FSDP2 as it was planned, and a line for every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.schema import FROM_STRING
from shardwise.config.trees import YamlDumper, read_file
from shardwise.errors import printable
from shardwise.migrate.line import Line, Outcome, changed, dropped, mapped
from shardwise.migrate.source import Source
from shardwise.migrate.trainer_names import NAMES, SECTIONS
from shardwise.plan.decisions import Decisions
from shardwise.plan.planned import Plan

_WORDS = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
_AXES = {"replicate": "dp_replicate", "shard": "dp_shard", "tensor": "tp", "context": "cp"}
_LOOP = "Accelerate's file has no training loop"


def accelerate_tree(plan: Plan) -> dict[str, Any]:
    """The keys of an Accelerate file that runs what was planned."""
    tree: dict[str, Any] = {}
    for settings in _by_path(plan).values():
        tree |= settings
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        **_nested(tree),
    }
    if found["distributed_type"] != "FSDP":
        return found
    always = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    found["fsdp_config"] = {**always, **found.get("fsdp_config", {})}
    return found


def accelerate_lines(file: Path, plan: Plan) -> list[Line]:
    """A line for every key of the file, then one for each decision that it leaves to the plan."""
    made, decided = _by_path(plan), _decided(plan.decided)
    said: set[str] = set()
    lines = []
    for leaf in Source(read_file(file).tree).leaves():
        path = _our_path(leaf.path)
        said.add(path)
        value = decided.get(path, leaf.value)
        lines.append(Line(leaf.key, leaf.value, _outcome(path, value, made)))
    for path, settings in made.items():
        if path not in said and settings and path in decided:
            why = _differs(path, decided[path], settings) or "as planned"
            lines.append(Line(path, decided[path], Outcome("assumed", why, settings)))
    return lines


def dump_accelerate(tree: Mapping[str, Any], file: Path) -> str:
    """The text of the Accelerate file."""
    body = yaml.dump(dict(tree), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    return f"# From {printable(str(file))}, by `shardwise migrate --to accelerate`.\n{body}"


def _our_path(path: tuple[str, ...]) -> str:
    if len(path) == 1:
        return f"{path[0]}.{FROM_STRING[path[0]]}" if path[0] in FROM_STRING else path[0]
    return ".".join(path[:2])


def _outcome(path: str, value: Any, made: Mapping[str, Mapping[str, Any]]) -> Outcome:
    if made.get(path):
        why = _differs(path, value, made[path])
        return changed(made[path], why) if why else mapped(made[path], "the same")
    if path in NAMES:
        return dropped(f"{_LOOP}; it is {NAMES[path]}")
    return dropped(SECTIONS.get(path.partition(".")[0], _LOOP))


def _differs(path: str, value: Any, settings: Mapping[str, Any]) -> str:
    """What the nearest key of Accelerate does otherwise; nothing where it is the same."""
    if path == "shard.reshard_after_forward" and not isinstance(value, bool):
        return "Accelerate has no groups: parameters are freed, or kept by all ranks"
    if path == "memory.checkpoint_activations" and value not in ("none", "full"):
        return "Accelerate recomputes every block, or none"
    if path == "precision.reduce" and _WORDS[value] != settings["mixed_precision"]:
        return "Accelerate reduces in the format of mixed_precision"
    if path == "cluster.name":
        return "machines and ranks; an Accelerate file names no GPU"
    return ""


def _decided(chosen: Decisions) -> dict[str, Any]:
    """Decisions by the setting that a user writes for them."""
    return {
        "shard.strategy": chosen.strategy,
        "shard.reshard_after_forward": chosen.reshard_after_forward,
        "mesh.replicate": chosen.replicate,
        "mesh.shard": chosen.shard,
        "mesh.tensor": chosen.tensor,
        "mesh.context": chosen.context,
        "precision.param": chosen.param_dtype,
        "precision.reduce": chosen.reduce_dtype,
        "memory.compile": chosen.compile,
        "memory.offload": "cpu" if chosen.offload else "none",
        "memory.checkpoint_activations": chosen.checkpoint_activations,
    }


def _by_path(plan: Plan) -> dict[str, dict[str, Any]]:
    """Accelerate's keys by the setting of ours that they come from."""
    chosen, shard = plan.decided, plan.config.shard
    is_cpu = plan.cluster.device == "cpu"
    made: dict[str, dict[str, Any]] = {
        "cluster.name": {
            "num_machines": plan.cluster.num_nodes,
            "num_processes": plan.world_size,
            **({"use_cpu": True} if is_cpu else {}),
        },
        "precision.param": {"mixed_precision": _WORDS[chosen.param_dtype]},
        "precision.reduce": {"mixed_precision": _WORDS[chosen.param_dtype]},
        "memory.compile": _compiled(chosen),
    }
    made |= _axes(chosen)
    if chosen.strategy == "no_shard":
        several = "MULTI_CPU" if is_cpu else "MULTI_GPU"
        made["shard.strategy"] = {"distributed_type": several if plan.world_size > 1 else "NO"}
        return made
    frees = {"fsdp_config.fsdp_reshard_after_forward": bool(chosen.reshard_after_forward)}
    made["shard.strategy"] = dict(frees)
    made["shard.reshard_after_forward"] = dict(frees)
    made["memory.offload"] = {"fsdp_config.fsdp_offload_params": chosen.offload}
    recomputes = chosen.checkpoint_activations not in ("none", 0)
    made["memory.checkpoint_activations"] = {
        "fsdp_config.fsdp_activation_checkpointing": recomputes
    }
    if shard.unit_classes:
        key = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
        made["shard.unit_classes"] = {key: ",".join(shard.unit_classes)}
    if shard.unit_min_params:
        made["shard.unit_min_params"] = {
            "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_config.fsdp_min_num_params": shard.unit_min_params,
        }
    return made


def _axes(chosen: Decisions) -> dict[str, dict[str, Any]]:
    """The sizes of a mesh of several axes."""
    sizes = {
        name: (short, getattr(chosen, name))
        for name, short in _AXES.items()
        if getattr(chosen, name) > 1
    }
    one_axis = "replicate" if chosen.strategy == "no_shard" else "shard"
    if not sizes.keys() - {one_axis}:
        return {}
    return {
        f"mesh.{name}": {f"parallelism_config.parallelism_config_{short}_size": size}
        for name, (short, size) in sizes.items()
    }


def _compiled(chosen: Decisions) -> dict[str, Any]:
    if not chosen.compile:
        return {}
    return {
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "dynamo_config.dynamo_use_regional_compilation": True,
    }


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree
