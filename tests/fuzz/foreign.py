"""Sound files of other tools, by the name that each is written under."""

from __future__ import annotations

from typing import Any

_SCRIPT = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from transformers import TrainingArguments
args = TrainingArguments(output_dir="out", learning_rate=2e-5, fsdp=["full_shard", "offload"])
model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)
model.clip_grad_norm_(1.0)
"""
_TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
"""
_FSDP: dict[str, Any] = {
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "HYBRID_SHARD",
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 1000,
    "fsdp_offload_params": False,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
}
FOREIGN: dict[str, Any] = {
    "train.py": _SCRIPT,
    "titan.toml": _TITAN,
    "accelerate.yml": {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 16,
        "fsdp_config": _FSDP,
        "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 8},
    },
    "ds.json": {
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale": 0},
        "zero_optimization": {
            "stage": 3,
            "mics_shard_size": 8,
            "zero_hpz_partition_size": 8,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.99]}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 50, "cos_min_ratio": 0.1},
        },
    },
    "axolotl.yaml": {
        "base_model": "org/model",
        "rl": "dpo",
        "rl_beta": 0.1,
        "adapter": "qlora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj", "v_proj"],
        "datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "org/b", "split": "train"}],
        "val_set_size": 0.05,
        "num_epochs": 2,
        "warmup_ratio": 0.1,
        "max_steps": 20,
        "bf16": "auto",
        "fsdp": ["full_shard", "auto_wrap"],
        "fsdp_config": _FSDP,
        "deepspeed": {"zero_optimization": {"stage": 2}},
    },
    "llamafactory.yaml": {
        "model_name_or_path": "org/model",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_target": "all",
        "dataset": "a,b",
        "cutoff_len": 512,
        "save_steps": 0.1,
        "deepspeed": "ds.json",
        "report_to": ["wandb", "tensorboard"],
        "output_dir": "out/one",
    },
    "tune.yaml": {
        "output_dir": "/tmp/one",
        "model": {"_component_": "a.lora_b", "lora_attn_modules": ["q_proj"], "lora_rank": 8},
        "checkpointer": {"_component_": "a.B", "checkpoint_dir": "${output_dir}/${seed}"},
        "dataset": {"_component_": "a.alpaca_dataset", "packed": True, "split": "train[:95%]"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "clip_grad_norm": None,
        "seed": 3,
        "epochs": 1,
        "max_steps_per_epoch": 7,
    },
}
