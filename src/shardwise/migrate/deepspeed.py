"""DeepSpeed's JSON, and the section that Accelerate has for its plugin."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.deepspeed_loop import LOOP_ASSUMED, LOOP_RULES
from shardwise.migrate.deepspeed_offload import offload_rules, optimizer_rule, parameters_rule
from shardwise.migrate.foreign_axes import HEADS, PARTS, TENSOR
from shardwise.migrate.foreign_values import dtype, flag, positive, whole
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

_ZERO = "zero_optimization"
_BUCKETS = "there are no buckets: a unit, usually one block, is gathered and reduced at a time"
_HEURISTIC = "units are gathered and freed as a whole; shard.reshard_after_forward says when"
_SEQUENCES = "keys and values are gathered in precision.param"
_PLANS = "the plan's search chooses batch and mesh"


def _stage(value: Any, source: Source) -> Outcome:
    stage = whole(value)
    if stage not in (0, 1, 2, 3):
        raise BadValueError(f"there is no stage {stage}")
    if stage == 3 and _mics(source):
        return always("MiCS shards inside a group: see mics_shard_size")
    outcomes = {
        0: mapped({"shard.strategy": "no_shard"}, "DDP: a whole copy on every rank"),
        1: changed(
            {"shard.strategy": "shard_grad_op"},
            "FSDP2 shards gradients with the optimizer, which is stage 2; it takes less memory",
        ),
        2: mapped({"shard.strategy": "shard_grad_op"}, "ZeRO-2: parameters stay for backward"),
        3: mapped({"shard.strategy": "full_shard"}, "ZeRO-3"),
    }
    return outcomes[stage]


def _mics(source: Source) -> int:
    try:
        return max(0, whole(source.get(f"{_ZERO}.mics_shard_size", 0)))
    except BadValueError:
        return 0


def _mics_size(value: Any, _: Source) -> Outcome:
    size = whole(value)
    if size <= 0:
        return always("MiCS is off in the file")
    settings = {"shard.strategy": "hybrid_shard", "mesh.shard": size}
    return mapped(settings, "MiCS is HSDP: sharded inside a group, replicated across groups")


def _hpz(value: Any, _: Source) -> Outcome:
    size = positive(value)
    if size == 1:
        return always("hpZ is off in the file")
    return mapped(
        {"shard.reshard_after_forward": size},
        "parameters are kept in groups of this many ranks between forward and backward",
    )


def _format(name: str) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        if not flag(value):
            return always(f"no {name}, in the file and here")
        reduce = source.get("communication_data_type")
        try:
            reduced = name if reduce is None else dtype(reduce)
        except BadValueError:
            reduced = name
        why = f"DeepSpeed reduces gradients in {reduced} too; precision.reduce=fp32 is safer"
        return mapped({"precision.param": name, "precision.reduce": reduced}, why)

    return KeyRule(translate)


def _is_on(source: Source, *keys: str) -> bool:
    values = (str(source.get(key, False)).lower() for key in keys)
    return any(value in ("true", "1", "auto") for value in values)


def _loss_scale(value: Any, source: Source) -> Outcome:
    scale = whole(value)
    if not _is_on(source, "fp16.enabled"):
        return dropped("there is no loss scale without fp16")
    if scale == 0:
        return always("the loss scale adapts to overflows")
    return changed({"precision.loss_scale": float(scale)}, "the first scale; it then adapts")


def _scale_power(value: Any, source: Source) -> Outcome:
    power = whole(value)
    if str(source.get("fp16.enabled")).lower() != "true" or source.get("fp16.loss_scale"):
        return dropped("it is the first loss scale of fp16, which is not used")
    if not 0 <= power <= 64:
        raise BadValueError(f"2 to the power of {power} is no loss scale")
    return mapped({"precision.loss_scale": float(2**power)}, "the first loss scale")


def _compiles(value: Any, _: Source) -> Outcome:
    return mapped({"memory.compile": flag(value)}, "each block is compiled by itself, or none is")


def _reduce_dtype(value: Any, source: Source) -> Outcome:
    if not _is_on(source, "bf16.enabled", "bfloat16.enabled", "fp16.enabled"):
        return mapped({"precision.reduce": dtype(value)}, "the format of the gradient reduction")
    return always(f"{dtype(value)} is in precision.reduce")


def _both(name: str, rule: KeyRule) -> dict[str, KeyRule]:
    """DeepSpeed takes keys of stage 3 with and without their prefix."""
    return {f"{_ZERO}.stage3_{name}": rule, f"{_ZERO}.{name}": rule}


_STAGE_3: dict[str, KeyRule] = {
    **_both("prefetch_bucket_size", otherwise(f"{_BUCKETS}; the plan decides how far ahead")),
    **_both("param_persistence_threshold", otherwise("small parameters are sharded like all")),
    **_both("model_persistence_threshold", otherwise("small parameters are sharded like all")),
    **_both("max_live_parameters", otherwise(_HEURISTIC)),
    **_both("max_reuse_distance", otherwise(_HEURISTIC)),
    **_both("module_granularity_threshold", otherwise("units are found from the model")),
    **_both("use_all_reduce_for_fetch_params", otherwise("parameters are all-gathered")),
    **_both("allgather_sequential", otherwise("parameters of a unit are gathered together")),
    **_both(
        "gather_16bit_weights_on_model_save",
        otherwise("checkpoints are sharded; `shardwise export` writes whole safetensors"),
    ),
    **_both(
        "gather_fp16_weights_on_model_save",
        otherwise("checkpoints are sharded; `shardwise export` writes whole safetensors"),
    ),
}
_ZERO_RULES: dict[str, KeyRule] = {
    "stage": KeyRule(_stage),
    "mics_shard_size": KeyRule(_mics_size),
    "mics_hierarchical_params_gather": otherwise("NCCL chooses how a gather crosses nodes"),
    "zero_hpz_partition_size": KeyRule(_hpz),
    **each(
        kept("FSDP2 always does so"),
        "contiguous_gradients reduce_scatter allgather_partitions overlap_comm",
    ),
    **each(
        otherwise(_BUCKETS),
        "reduce_bucket_size allgather_bucket_size sub_group_size "
        "use_multi_rank_bucket_allreduce round_robin_gradients",
    ),
    "zero_quantized_weights": unless("precision.linear=float8 gathers weights in eight bits"),
    "zero_quantized_nontrainable_weights": unless("frozen weights are gathered in precision.param"),
    "zero_quantized_gradients": unless("gradients are reduced in precision.reduce"),
    "zeropp_loco_param.*": drop("gradients are reduced in precision.reduce"),
    "zenflow.*": drop("there is no ZenFlow; the optimizer's step is exact"),
    "leaf_module.*": otherwise("units are found from the model; shard.unit_classes names them"),
    **each(
        otherwise("the insides of DeepSpeed have no counterpart"),
        "load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1 "
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    ),
}
_OTHERS: dict[str, KeyRule] = {
    **{f"{key}.enabled": _format("bf16") for key in ("bf16", "bfloat16")},
    "fp16.enabled": _format("fp16"),
    "fp16.loss_scale": KeyRule(_loss_scale),
    "fp16.initial_scale_power": KeyRule(_scale_power),
    "fp16.fp16_master_weights_and_grads": unless("master weights are fp32"),
    "fp16.*": otherwise("the loss scale halves at an overflow and doubles after 2000 good steps"),
    "bf16.bf16_optimizer_states": KeyRule(
        lambda value, _: mapped(
            {"optim.state": "bf16" if flag(value) else "fp32"}, "the format of Adam's moments"
        )
    ),
    "bf16.*": unless("master weights and gradients are fp32"),
    "bfloat16.*": unless("master weights and gradients are fp32"),
    "torch_autocast.enabled": unless("precision.param is the format of the whole model"),
    "torch_autocast.*": drop("precision.param is the format of the whole model"),
    "amp.enabled": unless("there is no Apex; write precision.param=fp16"),
    "amp.*": drop("there is no Apex"),
    "communication_data_type": KeyRule(_reduce_dtype),
    "data_types.grad_accum_dtype": otherwise("gradients add up in precision.reduce"),
    "compile.enabled": KeyRule(_compiles),
    "compile.deepcompile": KeyRule(_compiles),
    "compile.disable": KeyRule(lambda value, source: _compiles(not flag(value), source)),
    "compile.*": drop("torch.compile's own defaults are used"),
    "activation_checkpointing.*": otherwise(
        "the script turns it on there; memory.checkpoint_activations does here"
    ),
    **each(TENSOR, "tensor_parallel.autotp_size tensor_parallel.tp_size"),
    "tensor_parallel.*": PARTS,
    "sequence_parallel_size": HEADS,
    "seq_parallel_communication_data_type": otherwise(_SEQUENCES),
    **{f"{_ZERO}.{name}": rule for name, rule in _ZERO_RULES.items()},
    **offload_rules(f"{_ZERO}."),
    **_STAGE_3,
    **each(drop("nothing is read or written beside training"), ("aio.*", "nebula.*")),
    **each(drop(_PLANS), ("autotuning.*", "elasticity.*")),
    **each(
        drop("there is no counterpart, and training goes on without it"),
        (
            "compression_training.*",
            "progressive_layer_drop.*",
            "quantize_training.*",
            "eigenvalue.*",
            "sparse_attention.*",
            "data_efficiency.*",
            "curriculum_learning.*",
            "hybrid_engine.*",
            "pipeline.*",
            "weight_quantization.*",
        ),
    ),
    "zero_allow_untested_optimizer": otherwise("AdamW is the optimizer"),
    "zero_force_ds_cpu_optimizer": otherwise("torch's AdamW steps in host memory"),
}
DEEPSPEED = Reader(
    "deepspeed",
    "DeepSpeed",
    {**_OTHERS, **LOOP_RULES},
    (
        Assumed(
            (f"{_ZERO}.stage",),
            0,
            {"shard.strategy": "no_shard"},
            "DeepSpeed without a stage is DDP",
        ),
        Assumed(
            ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "amp.enabled"),
            "fp32",
            {"precision.param": "fp32", "precision.reduce": "fp32"},
            "DeepSpeed computes in fp32 where no other format is enabled",
        ),
        *LOOP_ASSUMED,
    ),
    auto="`auto` takes the Trainer's value; here the plan or the default decides",
)


def accelerate_section() -> dict[str, KeyRule]:
    """The rules of `deepspeed_config` in an Accelerate file."""
    section = "deepspeed_config"
    rules = {
        "zero_stage": KeyRule(_stage),
        "offload_optimizer_device": optimizer_rule([f"{section}.offload_param_device"]),
        "offload_param_device": parameters_rule([f"{section}.offload_optimizer_device"]),
        "offload_optimizer_nvme_path": drop("nothing is kept on NVMe"),
        "offload_param_nvme_path": drop("nothing is kept on NVMe"),
        "gradient_accumulation_steps": LOOP_RULES["gradient_accumulation_steps"],
        "gradient_clipping": LOOP_RULES["gradient_clipping"],
        "zero3_init_flag": kept("the model is built without memory, and each rank reads its rows"),
        "zero3_save_16bit_model": otherwise(
            "checkpoints are sharded; `shardwise export` writes whole safetensors"
        ),
        "deepspeed_moe_layer_cls_names": otherwise("units are found from the model"),
        "seq_parallel_communication_data_type": otherwise(_SEQUENCES),
        **each(
            drop("shardwise starts its own ranks; on several nodes it runs under torchrun or srun"),
            "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter "
            "deepspeed_inclusion_filter deepspeed_master_addr deepspeed_master_port",
        ),
        "deepspeed_config_file": drop("that file cannot be read; migrate it by itself"),
    }
    return {f"{section}.{name}": rule for name, rule in rules.items()}
