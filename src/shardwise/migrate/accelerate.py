"""Accelerate's YAML: launcher, FSDP 1 and 2, the DeepSpeed plugin, meshes, fp8, dynamo."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.deepspeed import accelerate_section
from shardwise.migrate.foreign_axes import CONTEXT, HEADS, TENSOR
from shardwise.migrate.foreign_values import dtype, flag, positive
from shardwise.migrate.fsdp_section import SECTION, fsdp_rules, fsdp_value, replicas
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    kept,
    otherwise,
    unless,
)
from shardwise.migrate.line import BadValueError, Outcome, always, changed, dropped, mapped
from shardwise.migrate.source import Source

_SHARDED = ("FSDP", "DEEPSPEED")
_DDP = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
_LAUNCH = "shardwise starts its own ranks; on several nodes it runs under torchrun or srun"


def _kind(source: Source) -> str:
    return str(source.get("distributed_type", "NO")).strip().upper()


def _distributed(value: Any, source: Source) -> Outcome:
    kind = str(value).strip().upper()
    if kind in _SHARDED:
        return always("the run is sharded; its section says how")
    if kind in _DDP:
        if replicas(source) > 1 or source.get("parallelism_config"):
            return changed({}, "the mesh of parallelism_config says how the ranks are laid out")
        return mapped({"shard.strategy": "no_shard"}, "DDP: a whole copy on every rank")
    if kind == "NO":
        return mapped({"shard.strategy": "no_shard"}, "one rank, so nothing is sharded")
    return dropped(f"there is no {kind}; the plan chooses a strategy of FSDP2")


def _precision(value: Any, source: Source) -> Outcome:
    word = str(value).strip().lower()
    if word == "fp8":
        return mapped(
            {"precision.param": "bf16", "precision.linear": "float8"},
            "float8 matmuls of torchao, with one scale for each tensor",
        )
    param = dtype(word)
    if param == "fp32" or _kind(source) not in _SHARDED:
        reduce = "fp32"
        why = "gradients of fp32 parameters are reduced in fp32"
    else:
        reduce = param
        why = f"Accelerate reduces gradients in {param} too; precision.reduce=fp32 is safer"
    return mapped({"precision.param": param, "precision.reduce": reduce}, why)


def _environment(value: Any, _: Source) -> Outcome:
    why = "runs start here, or under torchrun and srun"
    return always(why) if str(value).strip().upper() == "LOCAL_MACHINE" else dropped(why)


def _old_fp16(value: Any, source: Source) -> Outcome:
    return _precision("fp16" if flag(value) else "no", source)


def _on_cpu(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return always("devices come from cluster.name")
    try:
        ranks = positive(source.get("num_processes", 1))
    except BadValueError:
        ranks = 1
    return mapped({"cluster.name": f"{ranks}xCPU"}, "ranks on this machine's CPU")


def _ranks(value: Any, source: Source) -> Outcome:
    if value == -1:
        return dropped("-1 leaves it to the command line; cluster.name says it here")
    count = positive(value)
    if "cluster.name" in source.given:
        return changed({}, "cluster.name says how many there are")
    if str(source.get("use_cpu", False)).lower() == "true":
        return always("part of cluster.name")
    return changed({}, f"cluster.name counts ranks of a kind of GPU: {shape(source, count)}")


def shape(source: Source, ranks: int) -> str:
    """The cluster's name as far as the file knows it."""
    try:
        machines = positive(source.get("num_machines", 1))
    except BadValueError:
        machines = 1
    if machines == 1 or ranks % machines:
        return f"{ranks}xKIND"
    return f"{machines}x{ranks // machines}xKIND"


def _axis(path: str) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        size = positive(value)
        settings: dict[str, Any] = {path: size}
        if replicas(source) > 1:
            settings["shard.strategy"] = "hybrid_shard"
        return mapped(settings, "an axis of the mesh")

    return KeyRule(translate)


def _dynamo(value: Any, _: Source) -> Outcome:
    compiles = str(value).strip().lower() not in ("no", "false", "none", "")
    why = "each block is compiled by itself" if compiles else "nothing is compiled"
    return mapped({"memory.compile": compiles}, why)


def _fp8_gather(value: Any, _: Source) -> Outcome:
    if flag(value):
        return mapped({"precision.linear": "float8"}, "weights are gathered in eight bits")
    return changed({}, "with precision.linear=float8 weights are gathered in eight bits")


_MESH = {
    "dp_replicate_size": _axis("mesh.replicate"),
    "dp_shard_size": _axis("mesh.shard"),
    "tp_size": TENSOR,
    "cp_size": CONTEXT,
    "sp_size": HEADS,
    **each(
        otherwise("the model and the attention kernel say how an axis computes"),
        "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable "
        "sp_attn_implementation cp_handler sp_handler tp_handler",
    ),
}
_DYNAMO = {
    "backend": KeyRule(_dynamo),
    "use_regional_compilation": kept("each block is compiled by itself"),
    **each(drop("torch.compile's own defaults are used"), "mode use_fullgraph use_dynamic"),
}
_RULES: dict[str, KeyRule] = {
    "distributed_type": KeyRule(_distributed),
    "mixed_precision": KeyRule(_precision),
    "fp16": KeyRule(_old_fp16),
    "use_cpu": KeyRule(_on_cpu),
    "num_processes": KeyRule(_ranks),
    "num_machines": otherwise("cluster.name counts nodes: NODESxGPUSxKIND"),
    "compute_environment": KeyRule(_environment),
    "gradient_accumulation_steps": KeyRule(
        lambda value, _: mapped({"train.accumulation": positive(value)}, "micro-batches of a step")
    ),
    SECTION: unless("expected a mapping", {}),
    **fsdp_rules(),
    **{f"parallelism_config.{name}": rule for name, rule in _MESH.items()},
    **{f"parallelism_config.parallelism_config_{name}": rule for name, rule in _MESH.items()},
    **{f"dynamo_config.{name}": rule for name, rule in _DYNAMO.items()},
    **{f"dynamo_config.dynamo_{name}": rule for name, rule in _DYNAMO.items()},
    "dynamo_backend": KeyRule(_dynamo),
    **accelerate_section(),
    "fp8_config.enable_fsdp_float8_all_gather": KeyRule(_fp8_gather),
    "fp8_config.*": otherwise("float8 is torchao's, with its own scaling; see precision.linear"),
    "megatron_lm_config.*": drop("there is no Megatron-LM"),
    "mpirun_config.*": drop(_LAUNCH),
    "kt_config.*": drop("there is no KTransformers"),
    "ipex_config.*": drop("there is no IPEX"),
    **each(
        drop(_LAUNCH),
        "machine_rank gpu_ids main_process_ip main_process_port rdzv_backend same_network "
        "main_training_function enable_cpu_affinity command_file commands "
        "num_cpu_threads_per_process",
    ),
    **each(
        unless("there are no TPUs", "no"),
        "downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm tpu_cluster",
    ),
    "debug": unless("`shardwise train` compares ranks before they form a group"),
    **each(
        drop("runs do not start on SageMaker"),
        "ec2_instance_type iam_role_name profile region image_uri py_version pytorch_version "
        "transformers_version base_job_name additional_args sagemaker_inputs_file "
        "sagemaker_metrics_file num_processes_per_host",
    ),
}


def _is_fsdp_without_strategy(source: Source) -> bool:
    said = (fsdp_value(source, name) for name in ("sharding_strategy", "reshard_after_forward"))
    return _kind(source) == "FSDP" and all(value is None for value in said)


ACCELERATE = Reader(
    "accelerate",
    "Accelerate",
    _RULES,
    (
        Assumed(
            ("fsdp_config.fsdp_reshard_after_forward",),
            True,
            {"shard.strategy": "full_shard"},
            "`accelerate launch` frees parameters after forward",
            _is_fsdp_without_strategy,
        ),
        Assumed(
            ("mixed_precision", "fp16"),
            "no",
            {"precision.param": "fp32", "precision.reduce": "fp32"},
            "`accelerate launch` computes in the model's own format, which is fp32 for training",
        ),
    ),
    links={"deepspeed_config.deepspeed_config_file": "deepspeed"},
)
