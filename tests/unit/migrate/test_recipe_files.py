"""Files that hold a whole recipe: model, data and loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from migrated import fate, lines_of, migrated, why

from shardwise.migrate.migration import migrate_file

AXOLOTL: dict[str, Any] = {
    "base_model": "org/model",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "v_proj"],
    "datasets": [
        {"path": "data/a.jsonl", "type": "chat_template", "split": "train"},
        {"path": "org/other", "type": "alpaca"},
    ],
    "sequence_len": 1024,
    "sample_packing": True,
    "val_set_size": 0.05,
    "micro_batch_size": 2,
    "num_epochs": 3,
    "max_steps": 50,
    "warmup_ratio": 0.1,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "cosine_min_lr_ratio": 0.2,
    "learning_rate": "2e-4",
    "bf16": "auto",
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {"fsdp_offload_params": "false"},
    "wandb_project": "mine",
    "output_dir": "./outputs/one",
}


def test_axolotl(tmp_path: Path) -> None:
    done = migrated(tmp_path, AXOLOTL)
    expected = {
        "model.name": "org/model",
        "adapter.method": "lora",
        "adapter.rank": 8,
        "adapter.targets": ["q_proj", "v_proj"],
        "data.source": "jsonl",
        "data.path": "data/a.jsonl",
        "data.format": "chat",
        "data.seq_len": 1024,
        "data.eval_fraction": 0.05,
        "train.micro_batch": 2,
        "train.steps": 50,
        "optim.warmup_steps": 5,
        "optim.min_lr_ratio": 0.2,
        "optim.lr": 2e-4,
        "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.0,
        "shard.strategy": "full_shard",
        "memory.offload": "none",
        "optim.state": "int8",
        "observe.wandb_project": "mine",
        "name": "one",
        "runs_dir": "outputs",
    }
    assert {key: done.settings.get(key) for key in expected} == expected
    assert done.settings["adapter.base"] == "nf4"
    assert "data.mixture" in why(done, "datasets[1].path")
    assert fate(done, "adam_beta1") == "assumed"


ZERO = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
FACTORY = {"model_name_or_path": "m", "finetuning_type": "full"}


@pytest.mark.parametrize(
    ("tree", "key", "expected"),
    [
        ({"base_model": "m", "tensor_parallel_size": 2}, "tensor_parallel_size", "tensor"),
        ({"base_model": "m", "context_parallel_size": 2}, "context_parallel_size", "context"),
        ({**FACTORY, "cp_size": 2}, "cp_size", "context"),
        ({**ZERO, "tensor_parallel": {"tp_size": 2}}, "tensor_parallel.tp_size", "tensor"),
        ({**ZERO, "sequence_parallel_size": 2}, "sequence_parallel_size", "context"),
    ],
)
def test_axes_inside_a_replica(tmp_path: Path, tree: Any, key: str, expected: str) -> None:
    done = migrated(tmp_path, tree)
    assert done.settings[f"mesh.{expected}"] == 2
    assert fate(done, key) == ("changed" if key == "sequence_parallel_size" else "mapped")


@pytest.mark.parametrize(
    ("name", "setting", "fated"),
    [
        ("adamw_8bit", ("optim.state", "int8"), "mapped"),
        ("paged_adamw_8bit", ("optim.state", "int8"), "changed"),
        ("paged_adamw_32bit", ("memory.offload_optimizer", True), "changed"),
        ("lion_8bit", ("optim.name", "lion"), "changed"),
        ("adafactor", ("optim.name", "adafactor"), "changed"),
    ],
)
def test_moments_that_take_less_of_the_device(
    tmp_path: Path, name: str, setting: tuple[str, Any], fated: str
) -> None:
    done = migrated(tmp_path, {"learning_rate": 1e-4, "max_steps": 9, "optim": name})
    assert setting in done.settings.items() and fate(done, "optim") == fated


@pytest.mark.parametrize("is_on", [True, False])
def test_the_muon_of_llama_factory(tmp_path: Path, is_on: bool) -> None:
    tree = {"model_name_or_path": "m", "finetuning_type": "full", "use_muon": is_on}
    done = migrated(tmp_path, {**tree, "optim": "adamw_torch"})
    assert done.settings.get("optim.name") == ("muon" if is_on else None)
    assert fate(done, "use_muon") == ("changed" if is_on else "mapped")


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"base_model": "m", "rl": "grpo"}, "rl"),
        ({"model_name_or_path": "m", "finetuning_type": "full", "stage": "ppo"}, "stage"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}, "loss._component_"),
    ],
)
def test_another_task_is_a_warning(tmp_path: Path, tree: Any, key: str) -> None:
    assert lines_of(migrated(tmp_path, tree))[key].outcome.is_other_task


def test_answers_that_are_compared(tmp_path: Path) -> None:
    rows = [{"path": "org/pairs", "type": "chat_template.default", "split": "train"}]
    tree = {"base_model": "m", "rl": "dpo", "rl_beta": 0.2, "datasets": rows}
    done = migrated(tmp_path, {**tree, "sample_packing": False, "learning_rate": -1})
    assert done.settings["preference.objective"] == "dpo"
    assert done.settings["preference.beta"] == 0.2
    assert done.settings["data.format"] == "pairs" and "optim.lr" not in done.settings
    named = {"stage": "dpo", "pref_loss": "simpo", "dataset": "pairs", "template": "x"}
    done = migrated(tmp_path, {"model_name_or_path": "m", **named})
    assert lines_of(done)["stage"].outcome.is_other_task, "it has no data that it could learn from"


def test_llamafactory_with_the_deepspeed_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "z3.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    tree = {
        "model_name_or_path": "org/model",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_target": "all",
        "dataset": "identity,alpaca_en_demo",
        "template": "llama3",
        "cutoff_len": 2048,
        "deepspeed": "z3.json",
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "bf16": True,
    }
    done = migrated(tmp_path, tree)
    assert done.settings["shard.strategy"] == "full_shard"
    assert done.settings["precision.reduce"] == "bf16"
    assert done.settings["adapter.targets"] == "all-linear"
    assert (done.settings["adapter.rank"], done.settings["adapter.alpha"]) == (8, 16.0)
    assert "dataset_info.json" in why(done, "dataset")
    assert fate(done, "deepspeed: zero_optimization.stage") == "mapped"


def test_torchtune_with_references_and_builders(tmp_path: Path) -> None:
    tree = {
        "output_dir": "/tmp/checkpoints/one",
        "model": {
            "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
            "lora_attn_modules": ["q_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 8,
            "lora_alpha": 16,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "/models/llama",
            "output_dir": "${output_dir}",
        },
        "tokenizer": {"_component_": "x.y", "max_seq_len": None, "path": "${output_dir}/t.model"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4, "fused": True},
        "epochs": 2,
        "max_steps_per_epoch": 10,
        "batch_size": 2,
        "clip_grad_norm": None,
        "dtype": "bf16",
    }
    done = migrated(tmp_path, tree)
    assert done.settings["model.name"] == "/models/llama"
    assert done.settings["adapter.targets"] == [
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert done.settings["data.path"] == "yahma/alpaca-cleaned"
    assert done.settings["train.steps"] == 20
    assert done.settings["optim.clip_norm"] is None
    assert done.settings["optim.weight_decay"] == 0.01
    assert done.settings["optim.schedule"] == "constant"
    assert lines_of(done)["tokenizer.path"].value == "/tmp/checkpoints/one/t.model"


def test_a_reference_that_leads_to_itself_ends(tmp_path: Path) -> None:
    tree = {"a": "${b}${b}", "b": "${a}${a}", "model": {"_component_": "x.y_8b"}}
    assert fate(migrated(tmp_path, tree), "a") == "dropped"


TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
expert_parallel_degree = 1
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
[activation_checkpoint]
mode = "selective"
"""


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("AdamW", None), ("DistributedMuon", "muon"), ("Adam", None)]
)
def test_the_optimizer_of_torchtitan(tmp_path: Path, optimizer: str, expected: str | None) -> None:
    axes = "[parallelism]\ndata_parallel_shard_degree = -1\n[training]\nlocal_batch_size = 1\n"
    file = tmp_path / "one.toml"
    file.write_text(f'{axes}[optimizer]\nname = "{optimizer}"\n')
    done = migrate_file(file, "torchtitan", [])
    assert done.settings.get("optim.name") == expected
    assert fate(done, "optimizer.name") == ("mapped" if optimizer == "AdamW" else "changed")


def test_torchtitan(tmp_path: Path) -> None:
    file = tmp_path / "llama3_8b.toml"
    file.write_text(TITAN)
    done = migrate_file(file, None, [])
    expected = {
        "model.name": "llama-3.1-8b",
        "model.weights": "random",
        "shard.strategy": "hybrid_shard",
        "mesh.replicate": 2,
        "mesh.tensor": 4,
        "mesh.expert": None,
        "data.path": "allenai/c4",
        "optim.schedule": "wsd",
        "optim.decay_steps": 800,
        "optim.lr": 8e-4,
        "precision.linear": "float8",
        "precision.param": "bf16",
        "memory.checkpoint_activations": "selective",
        "train.steps": 1000,
    }
    assert {key: done.settings.get(key) for key in expected} == expected
    assert fate(done, "parallelism.pipeline_parallel_degree") == "dropped"
    assert not [line for line in done.lines if "unknown" in line.outcome.why]
