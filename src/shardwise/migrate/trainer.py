"""Arguments of the HF Trainer and of TRL's SFT, as JSON or YAML."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_values import flag, names, number, positive, whole
from shardwise.migrate.fsdp_section import SECTION, fsdp_rules, strategy_outcome
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    kept,
    otherwise,
    to,
    unless,
)
from shardwise.migrate.line import Outcome, always, changed, dropped, mapped
from shardwise.migrate.loop_rules import LOOP, half_format, lora_targets
from shardwise.migrate.source import Source
from shardwise.migrate.trl import TRL

_HUB = "`shardwise export` writes a directory, which `hf upload` takes"
_LOADER = "the loader reads ahead by itself"
_EVAL = "an evaluation is the loss over held-out sequences"
_LOG = "observe.log_every and events.jsonl say what is recorded"
_METHODS = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]


def _fsdp(value: Any, source: Source) -> Outcome:
    """`true`, or words such as `full_shard auto_wrap offload`."""
    if str(value).strip().lower() in ("true", "false"):
        if not flag(value):
            return always("the file does not shard")
        if source.get(f"{SECTION}.reshard_after_forward") is not None:
            return always("fsdp_config says how")
        return mapped({"shard.strategy": "full_shard"}, "FSDP2 frees parameters after forward")
    words = " ".join(names(value)).split()
    methods = [word for word in words if word.lower() in _METHODS]
    settings: dict[str, Any] = {}
    for method in methods[:1]:
        settings |= strategy_outcome(method, source).settings
    if "offload" in words:
        settings["memory.offload"] = "cpu"
    rest = [word for word in words if word not in (*methods, "offload", "auto_wrap")]
    if rest:
        return changed(settings, f"`{' '.join(rest)}` is no word of FSDP")
    return mapped(settings, "the same strategy; units are blocks")


def _four_bits(value: Any, _: Source) -> Outcome:
    if not flag(value):
        return always("weights are not quantised")
    return mapped({"adapter.base": "nf4"}, "frozen linear layers are in NF4")


def _eight_bits(value: Any, _: Source) -> Outcome:
    if not flag(value):
        return always("weights are not quantised")
    return dropped("frozen weights are in precision.param, or in four bits: adapter.base=nf4")


def _peft(value: Any, _: Source) -> Outcome:
    return mapped({"adapter.method": "lora" if flag(value) else "none"}, "what is trained")


LORA: dict[str, KeyRule] = {
    "use_peft": KeyRule(_peft),
    "lora_r": to("adapter.rank", positive, "rows of A"),
    "lora_alpha": to("adapter.alpha", number, "the product is multiplied by alpha / rank"),
    "lora_dropout": to("adapter.dropout", number, "on what goes into A"),
    "lora_target_modules": KeyRule(lora_targets),
    "use_rslora": to("adapter.rslora", flag, "alpha / sqrt(rank)"),
    "use_dora": to("adapter.dora", flag, "DoRA"),
    "lora_task_type": otherwise("the model is a causal language model"),
    "lora_modules_to_save": to("adapter.modules_to_save", names, "trained whole"),
    "lora_target_parameters": drop("patterns of adapter.targets such as experts.* name experts"),
    "load_in_4bit": KeyRule(_four_bits),
    "load_in_8bit": KeyRule(_eight_bits),
    "use_bnb_nested_quant": otherwise("adapter.base=nf4 has one way to keep its scales"),
    "bnb_4bit_quant_type": otherwise("four bits are NF4"),
}
TRAINING: dict[str, KeyRule] = {
    **LOOP,
    **fsdp_rules(),
    "evaluation_strategy": LOOP["eval_strategy"],
    "fsdp": KeyRule(_fsdp),
    "fsdp_min_num_params": fsdp_rules()[f"{SECTION}.min_num_params"],
    "fsdp_transformer_layer_cls_to_wrap": to("shard.unit_classes", names, "each of them is a unit"),
    "per_device_train_batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "gradient_accumulation_steps": to("train.accumulation", positive, "micro-batches of a step"),
    "learning_rate": to("optim.lr", number, "the peak rate"),
    "weight_decay": to("optim.weight_decay", number, "norms and biases are left out"),
    "adam_epsilon": to("optim.eps", number, "Adam's epsilon"),
    "lr_scheduler_kwargs.min_lr_rate": kept("optim.min_lr_ratio has it"),
    "lr_scheduler_kwargs.*": drop("optim.schedule has cosine, linear, wsd and constant"),
    "bf16": half_format("bf16"),
    "fp16": half_format("fp16"),
    "tf32": otherwise("torch's own setting of TF32 is used; matmuls are in precision.param"),
    "seed": to("train.seed", whole, "weights, order of data and dropout"),
    "load_best_model_at_end": to("checkpoint.keep_best", flag, "the step of the least loss"),
    "full_determinism": to("train.deterministic", flag, "deterministic algorithms"),
    "torch_compile": to("memory.compile", flag, "each block is compiled by itself"),
    "save_total_limit": to("checkpoint.keep", positive, "the oldest go first"),
    "resume_from_checkpoint": otherwise("the same command resumes from its run directory"),
    "dataloader_drop_last": otherwise("data is read around its end, so no batch is short"),
    "average_tokens_across_devices": kept("the loss is over the tokens of all ranks"),
    "ddp_timeout": to("train.hang_timeout_s", number, "seconds until ranks count as hung"),
    "gradient_checkpointing_kwargs.*": otherwise("recompute is never reentrant"),
    "use_liger_kernel": otherwise("kernels of our own, or torch's: train.kernels"),
    "liger_kernel_config.*": otherwise("kernels of our own, or torch's: train.kernels"),
    "accelerator_config.*": otherwise("data order is a function of seed and position"),
    "parallelism_config.*": drop("write the sizes of the mesh into section mesh"),
    "neftune_noise_alpha": drop("there is no noise on embeddings"),
    "label_smoothing_factor": unless("the loss is plain cross-entropy"),
    "use_cpu": unless("write cluster.name=1xCPU"),
    "no_cuda": unless("write cluster.name=1xCPU"),
    "auto_find_batch_size": otherwise("the plan finds the micro-batch: train.micro_batch=auto"),
    "train_sampling_strategy": otherwise("data is shuffled by a seed"),
    "group_by_length": unless("conversations are packed to equal lengths"),
    "data_seed": otherwise("train.seed orders the data too"),
    "ignore_data_skip": otherwise("a resume goes on at the next sequence"),
    "save_only_model": otherwise("checkpoints hold the optimizer too, so that a run can resume"),
    "save_safetensors": kept("`shardwise export` writes safetensors"),
    "deepspeed": drop("that file cannot be read; migrate it by itself"),
    "do_train": kept("`shardwise train` trains"),
    "do_eval": otherwise("data.eval_fraction holds sequences out"),
    "do_predict": unless("`shardwise generate` answers"),
    "per_device_eval_batch_size": otherwise("evaluation takes the micro-batch of training"),
    **each(
        otherwise("torch.compile's own defaults are used"),
        "torch_compile_backend torch_compile_mode",
    ),
    **each(
        drop(_HUB),
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    ),
    **each(
        otherwise(_LOADER),
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "remove_unused_columns label_names length_column_name dataset_num_proc dataset_kwargs "
        "preprocessing_num_workers",
    ),
    **each(
        otherwise(_EVAL),
        "eval_delay prediction_loss_only eval_on_start eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "include_inputs_for_metrics metric_for_best_model greater_is_better "
        "bf16_full_eval fp16_full_eval",
    ),
    **each(
        otherwise(_LOG),
        "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter logging_dir "
        "include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica "
        "disable_tqdm run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "skip_memory_metrics",
    ),
    **each(
        otherwise("FSDP2 is not DDP, and needs no such setting"),
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend local_rank",
    ),
    **each(
        drop("there is no counterpart"),
        "optim_args optim_target_modules use_cache torch_empty_cache_steps save_on_each_node "
        "enable_jit_checkpoint restore_callback_states_from_checkpoint debug past_index "
        "overwrite_output_dir jit_mode_eval use_ipex use_mps_device mp_parameters "
        "fp16_opt_level fp16_backend half_precision_backend tpu_num_cores tpu_metrics_debug "
        "split_batches dispatch_batches torchdynamo ray_scope",
    ),
}
# What changes numbers, and differs from our defaults.
TRAINER_ASSUMED: tuple[Assumed, ...] = (
    Assumed(("learning_rate",), 5e-5, {"optim.lr": 5e-5}, "the Trainer's default"),
    Assumed(
        ("adam_beta1", "adam_beta2"),
        [0.9, 0.999],
        {"optim.betas": [0.9, 0.999]},
        "the Trainer's default",
    ),
    Assumed(("weight_decay",), 0, {"optim.weight_decay": 0.0}, "the Trainer's default"),
    Assumed(
        ("lr_scheduler_type",),
        "linear",
        {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
        "the Trainer's default",
    ),
    Assumed(("seed",), 42, {"train.seed": 42}, "the Trainer's default"),
    Assumed(("per_device_train_batch_size",), 8, {"train.micro_batch": 8}, "the Trainer's default"),
    Assumed(
        ("gradient_accumulation_steps",), 1, {"train.accumulation": 1}, "the Trainer's default"
    ),
)
TRAINER = Reader(
    "trainer",
    "HF TrainingArguments",
    {**TRAINING, **TRL, **LORA},
    TRAINER_ASSUMED,
    links={"deepspeed": "deepspeed"},
    auto="`auto` leaves it to the Trainer; here the plan or the default decides",
)
