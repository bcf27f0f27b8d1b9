"""Calls of FSDP1, FSDP2, DeepSpeed, Accelerate and the Trainer, and what each becomes."""

from __future__ import annotations

FSDP1 = "torch.distributed.fsdp"
_MODEL = "model.name: shardwise builds the model on meta, shards it, and each rank reads its rows"
_RANKS = "nothing: `shardwise train` starts the ranks and their process group"
_LOOP = "nothing: the loop of `shardwise train` does it"
_SAVE = "nothing: checkpoints are sharded and saved every checkpoint.every steps"
_WHOLE = "`shardwise export` writes whole safetensors from a sharded checkpoint"
_PRECISION = "precision.param and precision.reduce"
_UNITS = "nothing: units are found from the model; shard.unit_classes names them"
_RECOMPUTE = "memory.checkpoint_activations"

# By the full name, as far as the imports of a script tell it.
CALLS: dict[str, str] = {
    f"{FSDP1}.FullyShardedDataParallel": "shard.strategy and mesh, without wrappers",
    f"{FSDP1}.fully_shard": "shard.strategy and mesh: units, order and prefetch are shardwise's",
    "torch.distributed._composable.fsdp.fully_shard": "shard.strategy and mesh",
    f"{FSDP1}.MixedPrecision": _PRECISION,
    f"{FSDP1}.MixedPrecisionPolicy": _PRECISION,
    "torch.distributed._composable.fsdp.MixedPrecisionPolicy": _PRECISION,
    f"{FSDP1}.CPUOffload": "memory.offload",
    f"{FSDP1}.CPUOffloadPolicy": "memory.offload",
    f"{FSDP1}.wrap.transformer_auto_wrap_policy": _UNITS,
    f"{FSDP1}.wrap.size_based_auto_wrap_policy": "shard.unit_min_params",
    f"{FSDP1}.wrap.wrap": _UNITS,
    f"{FSDP1}.wrap.enable_wrap": _UNITS,
    f"{FSDP1}.wrap.ModuleWrapPolicy": _UNITS,
    f"{FSDP1}.FullStateDictConfig": _WHOLE,
    f"{FSDP1}.ShardedStateDictConfig": _SAVE,
    f"{FSDP1}.FullOptimStateDictConfig": _SAVE,
    f"{FSDP1}.sharded_grad_scaler.ShardedGradScaler": "precision.loss_scale",
    "torch.distributed.device_mesh.init_device_mesh": "mesh.replicate and mesh.shard",
    "torch.distributed.init_process_group": _RANKS,
    "torch.distributed.destroy_process_group": _RANKS,
    "torch.nn.parallel.DistributedDataParallel": "shard.strategy=no_shard",
    "torch.distributed.checkpoint.save": _SAVE,
    "torch.distributed.checkpoint.load": "nothing: the same command resumes",
    "torch.utils.data.distributed.DistributedSampler": "nothing: ranks share one order of data",
    "torch.utils.data.DistributedSampler": "nothing: ranks share one order of data",
    "torch.utils.checkpoint.checkpoint": _RECOMPUTE,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing": (
        _RECOMPUTE
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": _RECOMPUTE,
    "torch.nn.utils.clip_grad_norm_": "optim.clip_norm",
    "torch.optim.AdamW": "optim: lr, betas, eps, weight_decay",
    "torch.compile": "memory.compile",
    "deepspeed.initialize": "shardwise migrate DS_CONFIG.json, whose settings become ours",
    "deepspeed.init_distributed": _RANKS,
    "deepspeed.add_config_arguments": "nothing: overrides are section.field=value",
    "deepspeed.zero.Init": _MODEL,
    "deepspeed.zero.GatheredParameters": "nothing: FSDP2 gathers a unit where it computes",
    "deepspeed.checkpointing.checkpoint": _RECOMPUTE,
    "deepspeed.checkpointing.configure": _RECOMPUTE,
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "optim with memory.offload_optimizer=true",
    "deepspeed.ops.adam.FusedAdam": "optim: lr, betas, eps, weight_decay",
    "accelerate.Accelerator": "a run of its own: cluster, shard, precision and train.accumulation",
    "accelerate.FullyShardedDataParallelPlugin": "shard, precision and memory",
    "accelerate.utils.FullyShardedDataParallelPlugin": "shard, precision and memory",
    "accelerate.DeepSpeedPlugin": "shard and memory",
    "accelerate.utils.DeepSpeedPlugin": "shard and memory",
    "accelerate.utils.ParallelismConfig": "mesh.replicate and mesh.shard",
    "accelerate.utils.set_seed": "train.seed",
    "accelerate.notebook_launcher": _RANKS,
    "transformers.Trainer": "`shardwise train`",
    "transformers.TrainingArguments": "optim, train, checkpoint and observe",
    "trl.SFTTrainer": "`shardwise train` with data.format",
    "trl.SFTConfig": "optim, train, data, checkpoint and observe",
    "peft.LoraConfig": "adapter",
    "peft.get_peft_model": "adapter.method=lora",
    "transformers.AutoModelForCausalLM.from_pretrained": _MODEL,
    "transformers.AutoTokenizer.from_pretrained": "data.tokenizer; unset, the model's own",
}
# Methods of what such a call returned.
METHODS: dict[str, dict[str, str]] = {
    f"{FSDP1}.FullyShardedDataParallel": {
        "clip_grad_norm_": "optim.clip_norm",
        "state_dict_type": _WHOLE,
        "set_state_dict_type": _WHOLE,
        "full_optim_state_dict": _SAVE,
        "sharded_optim_state_dict": _SAVE,
        "optim_state_dict": _SAVE,
        "optim_state_dict_to_load": "nothing: the same command resumes",
        "scatter_full_optim_state_dict": "nothing: the same command resumes",
        "summon_full_params": _WHOLE,
        "no_sync": "train.accumulation and memory.accumulate",
    },
    "deepspeed.initialize": {
        "backward": _LOOP,
        "step": _LOOP,
        "save_checkpoint": _SAVE,
        "load_checkpoint": "nothing: the same command resumes",
        "save_16bit_model": _WHOLE,
        "train_batch": _LOOP,
    },
    "accelerate.Accelerator": {
        "prepare": _MODEL,
        "backward": _LOOP,
        "accumulate": "train.accumulation",
        "clip_grad_norm_": "optim.clip_norm",
        "save_state": _SAVE,
        "load_state": "nothing: the same command resumes",
        "save_model": _WHOLE,
        "get_state_dict": _WHOLE,
        "unwrap_model": "nothing: there are no wrappers",
        "gather": _LOOP,
        "gather_for_metrics": _LOOP,
        "reduce": _LOOP,
        "wait_for_everyone": _LOOP,
        "print": "nothing: the first rank prints",
        "log": "observe",
        "init_trackers": "observe.tensorboard and observe.wandb",
        "autocast": "precision.param",
        "no_sync": "train.accumulation and memory.accumulate",
    },
}
# Arguments of FSDP's own calls, by the rule of `fsdp_config` that knows them.
ARGUMENTS: dict[str, str] = {
    "sharding_strategy": "sharding_strategy",
    "reshard_after_forward": "reshard_after_forward",
    "backward_prefetch": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
    "use_orig_params": "use_orig_params",
    "sync_module_states": "sync_module_states",
    "limit_all_gathers": "limit_all_gathers",
    "cpu_offload": "cpu_offload",
    "auto_wrap_policy": "auto_wrap_policy",
    "ignored_modules": "ignored_modules",
}
