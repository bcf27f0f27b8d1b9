"""`fsdp_config`, which Accelerate, the HF Trainer and axolotl share, with or without its prefix."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_values import dtype, flag, names, one_of, positive, whole
from shardwise.migrate.key_rules import KeyRule, drop, kept, otherwise, to, unless
from shardwise.migrate.line import (
    BadValueError,
    Outcome,
    Settings,
    always,
    changed,
    dropped,
    mapped,
)
from shardwise.migrate.source import Source

SECTION = "fsdp_config"
_PREFIX = "fsdp_"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OURS = {"FULL_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad_op", "NO_SHARD": "no_shard"}
_WRAPS = {
    "transformer_based_wrap": "transformer",
    "size_based_wrap": "size",
    "no_wrap": "none",
}


def fsdp_value(source: Source, name: str, default: Any = None) -> Any:
    """A value of the section, under either spelling."""
    plain = source.get(f"{SECTION}.{name}")
    return source.get(f"{SECTION}.{_PREFIX}{name}", default if plain is None else plain)


def fsdp_rules() -> dict[str, KeyRule]:
    """The rules of the section, under both spellings of every key."""
    rules = {f"{SECTION}.{name}": rule for name, rule in _RULES.items()}
    return {
        **rules,
        **{f"{SECTION}.{_PREFIX}{name}": rule for name, rule in _RULES.items()},
        f"{SECTION}.min_num_params": _RULES["min_num_params"],
    }


def strategy_name(value: Any) -> str:
    """FSDP1's name of a strategy, of which Accelerate takes the number too."""
    known = {str(number): name for number, name in enumerate(_STRATEGIES, start=1)} | {
        name: name for name in _STRATEGIES
    }
    found = known.get(str(value).strip().upper())
    if found is None:
        raise BadValueError(f"`{value}` is none of {', '.join(_STRATEGIES)}")
    return found


def strategy_outcome(value: Any, source: Source) -> Outcome:
    """The strategy by FSDP1's name, and its mesh where it has one."""
    name = strategy_name(value)
    if name in _OURS:
        why = "the same strategy"
        if name == "NO_SHARD":
            why = "DDP: a whole copy on every rank; `accelerate to-fsdp2` would make it shard"
        return mapped({"shard.strategy": _OURS[name]}, why)
    mesh = node_mesh(source)
    keeps = {"shard.reshard_after_forward": False} if name == "HYBRID_SHARD_ZERO2" else {}
    if mesh.get("mesh.replicate") == 1:
        ours = "shard_grad_op" if keeps else "full_shard"
        return changed({"shard.strategy": ours}, "one machine is one replica, so all ranks shard")
    why = "sharded inside a machine and replicated across machines"
    if not mesh:
        why += "; the plan chooses the mesh, because the file does not count machines and ranks"
    return mapped({"shard.strategy": "hybrid_shard", **mesh, **keeps}, why)


def node_mesh(source: Source) -> Settings:
    """One replica on each machine, where the file counts them."""
    try:
        machines = positive(source.get("num_machines"))
        ranks = positive(source.get("num_processes"))
    except BadValueError:
        return {}
    if ranks % machines:
        return {}
    return {"mesh.replicate": machines, "mesh.shard": ranks // machines}


def replicas(source: Source) -> int:
    """The size of the replicate axis that the file asks for by itself; 1 where it does not."""
    for key in ("parallelism_config_dp_replicate_size", "dp_replicate_size"):
        for place in (f"parallelism_config.{key}", key):
            if (value := source.get(place)) is not None:
                try:
                    return positive(value)
                except BadValueError:
                    return 1
    return 1


def _strategy(value: Any, source: Source) -> Outcome:
    outcome = strategy_outcome(value, source)
    if outcome.fate == "mapped" and not is_version_1(source):
        return changed(outcome.settings, f"{outcome.why}; FSDP2 of Accelerate ignores this key")
    return outcome


def is_version_1(source: Source) -> bool:
    """Whether the file means FSDP1."""
    version = fsdp_value(source, "version", source.get("fsdp_version", 1))
    return str(version).strip() != "2"


def _reshard(value: Any, source: Source) -> Outcome:
    if str(value).strip().upper() in _STRATEGIES:
        return strategy_outcome(value, source)
    frees = flag(value)
    hybrid = replicas(source) > 1
    if fsdp_value(source, "sharding_strategy") is not None:
        said = strategy_name(fsdp_value(source, "sharding_strategy"))
        if said == "NO_SHARD":
            return dropped("NO_SHARD gathers nothing that could be freed")
        hybrid = hybrid or said.startswith("HYBRID")
    if hybrid:
        settings = {"shard.strategy": "hybrid_shard", "shard.reshard_after_forward": frees}
        return mapped(settings, "parameters are freed after forward, or kept for backward")
    if frees:
        return mapped(
            {"shard.strategy": "full_shard"}, "ZeRO-3: parameters are freed after forward"
        )
    return mapped({"shard.strategy": "shard_grad_op"}, "ZeRO-2: parameters stay for backward")


def _wrap(value: Any, source: Source) -> Outcome:
    kind = one_of(_WRAPS)(value)
    if kind == "transformer":
        return always("a unit is one block; it is found where the file names no class")
    if kind == "none":
        return changed({}, "one unit for the whole model would gather all of it; units are blocks")
    threshold = fsdp_value(source, "min_num_params")
    return changed(
        {"shard.unit_min_params": positive(1e8 if threshold is None else threshold)},
        "modules with at least this many parameters become units, without those inside them",
    )


def _min_params(value: Any, source: Source) -> Outcome:
    if str(fsdp_value(source, "auto_wrap_policy", "")).upper() != "SIZE_BASED_WRAP":
        return dropped("it has an effect with SIZE_BASED_WRAP only")
    return mapped({"shard.unit_min_params": positive(value)}, "the smallest unit")


def _backward_prefetch(value: Any, _: Source) -> Outcome:
    words = {"backward_pre": 1, "backward_post": 2, "no_prefetch": 0, "1": 1, "2": 2, "3": 0}
    kind = one_of(words)(value)
    if kind == 1:
        return always("FSDP2 gathers one unit ahead in backward; the plan may gather more")
    if kind == 2:
        return changed({}, "FSDP2 knows BACKWARD_PRE alone, which overlaps more")
    return mapped({"shard.backward_prefetch": 0}, "nothing is gathered ahead")


def _forward_prefetch(value: Any, _: Source) -> Outcome:
    if flag(value):
        return mapped({"shard.forward_prefetch": 1}, "one unit is gathered ahead in forward")
    return changed({}, "the plan decides how many units are gathered ahead")


def _offload(value: Any, _: Source) -> Outcome:
    if flag(value):
        return mapped(
            {"memory.offload": "cpu"}, "parameters, gradients and optimizer are in host memory"
        )
    return mapped({"memory.offload": "none"}, "everything is on the device")


def _checkpointing(value: Any, _: Source) -> Outcome:
    return mapped(
        {"memory.checkpoint_activations": "full" if flag(value) else "none"},
        "blocks are recomputed in backward, or not",
    )


def _state_dict(value: Any, _: Source) -> Outcome:
    kind = str(value).strip().upper()
    if kind == "SHARDED_STATE_DICT":
        return always("checkpoints are always sharded")
    return changed({}, "checkpoints are sharded; `shardwise export` writes whole safetensors")


def _loading(value: Any, _: Source) -> Outcome:
    why = "each rank reads its own rows of the weights, so no rank ever holds the model"
    return always(why) if flag(value) else changed({}, why)


def _orig_params(value: Any, _: Source) -> Outcome:
    why = "FSDP2 always keeps the model's own parameters"
    return always(why) if flag(value) else changed({}, why)


def _version(value: Any, _: Source) -> Outcome:
    if whole(value) == 2:
        return always("every run is FSDP2")
    return changed({}, "every run is FSDP2: parameters are sharded one by one, not as a flat one")


def _mixed(value: Any, _: Source) -> Outcome:
    return mapped(
        {"precision.param": dtype(value), "precision.reduce": dtype(value)},
        "the same formats; fp32 is the safer one to reduce in",
    )


_RULES: dict[str, KeyRule] = {
    "version": KeyRule(_version),
    "sharding_strategy": KeyRule(_strategy),
    "reshard_after_forward": KeyRule(_reshard),
    "offload_params": KeyRule(_offload),
    "cpu_offload": KeyRule(_offload),
    "cpu_offload_pin_memory": to("memory.pin_memory", flag, "pinned host memory"),
    "auto_wrap_policy": KeyRule(_wrap),
    "transformer_layer_cls_to_wrap": to("shard.unit_classes", names, "each of them is a unit"),
    "min_num_params": KeyRule(_min_params),
    "backward_prefetch": KeyRule(_backward_prefetch),
    "backward_prefetch_policy": drop(
        "Accelerate never reads this key; `fsdp_backward_prefetch` is the one that it reads"
    ),
    "forward_prefetch": KeyRule(_forward_prefetch),
    "state_dict_type": KeyRule(_state_dict),
    "final_state_dict_type": KeyRule(_state_dict),
    "use_orig_params": KeyRule(_orig_params),
    "sync_module_states": otherwise(
        "nothing is broadcast: each rank reads, or draws by a seed, its own rows"
    ),
    "cpu_ram_efficient_loading": KeyRule(_loading),
    "activation_checkpointing": KeyRule(_checkpointing),
    "activation_cpu_offload": unless("memory.offload_activations takes a share of the blocks"),
    "limit_all_gathers": kept("FSDP2 holds few units at once; see shard.all_gather_limit"),
    "ignored_modules": drop("every parameter is sharded"),
    "mixed_precision_policy": KeyRule(_mixed),
    "xla": unless("there is no XLA"),
    "xla_fsdp_v2": unless("there is no XLA"),
    "xla_fsdp_grad_ckpt": unless("there is no XLA"),
    "xla_fsdp_settings": unless("there is no XLA"),
}
