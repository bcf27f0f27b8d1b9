"""torchtune's YAML, in which every part names its builder by `_component_`."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.datasets import where
from shardwise.migrate.foreign_axes import CONTEXT, PARTS, TENSOR
from shardwise.migrate.foreign_values import dtype, flag, names, number, positive, text, whole
from shardwise.migrate.interpolation import resolve
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    kept,
    nearly,
    otherwise,
    to,
    unless,
)
from shardwise.migrate.line import (
    BadValueError,
    Outcome,
    always,
    changed,
    dropped,
    mapped,
    other_task,
)
from shardwise.migrate.loop_rules import LOOP
from shardwise.migrate.preferences import BETA, SMOOTHING, objective
from shardwise.migrate.source import Source
from shardwise.migrate.torchtune_drops import DROPS, OTHER_TASK
from shardwise.migrate.trainer import LORA

# By the builder's name: where the records lie, and what they are.
_DATA = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "instruction"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "instruction"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "chat"),
}
_FORMATS = {
    "chat_dataset": "chat",
    "instruct_dataset": "instruction",
    "text_completion_dataset": "text",
}
_LAYERS = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


def _builder(value: Any) -> str:
    return text(value).rpartition(".")[2]


def _model(value: Any, _: Source) -> Outcome:
    name = _builder(value)
    if name.startswith("qlora"):
        settings = {"adapter.method": "lora", "adapter.base": "nf4"}
        return mapped(settings, "frozen linear layers are in NF4")
    if name.startswith("lora"):
        return mapped({"adapter.method": "lora"}, "checkpoint_dir says of which model")
    return mapped({"adapter.method": "none"}, "checkpoint_dir says which model")


def _checkpoint_dir(value: Any, source: Source) -> Outcome:
    kind = str(source.get("checkpointer._component_", ""))
    settings = {"model.name": text(value)}
    if "Meta" in kind:
        return changed(settings, "the directory needs config.json and safetensors of Hugging Face")
    return mapped(settings, "the directory of the model")


def _targets(value: Any, source: Source) -> Outcome:
    layers = [_LAYERS.get(name, name) for name in names(value)]
    if str(source.get("model.apply_lora_to_mlp", False)).lower() == "true":
        layers += _MLP
    return mapped({"adapter.targets": layers}, "layers with adapters, by transformers' names")


def _dataset(value: Any, source: Source) -> Outcome:
    name = _builder(value)
    if source.get("dataset.source") is not None:
        form = _FORMATS.get(name)
        if form is None:
            return changed({}, "data.format has text, chat, prompt, instruction and auto")
        return mapped({"data.format": form}, "what a record is")
    if name not in _DATA:
        return dropped("write data.source, data.path and data.format")
    path, form = _DATA[name]
    settings = {"data.source": "datasets", "data.path": path, "data.format": form}
    return changed(settings, "the same records; the model's chat template renders them")


def _files(value: Any, _: Source) -> Outcome:
    if str(value) in ("json", "csv", "text", "parquet"):
        return dropped("data.path takes the files that data_files names")
    return mapped(where(value), "a hub id, a directory, or a file by its suffix")


def _packed(value: Any, _: Source) -> Outcome:
    if flag(value):
        return always("sequences are packed")
    return mapped({"data.packing": "one"}, "each conversation has a sequence of its own")


def _split(value: Any, _: Source) -> Outcome:
    if "[" in text(value):
        plain = text(value).partition("[")[0]
        return changed({"data.split": plain}, "data.eval_fraction holds a share of the split out")
    return mapped({"data.split": text(value)}, "the split")


def _loss(value: Any, _: Source) -> Outcome:
    name = _builder(value)
    if "CrossEntropy" in name or name.startswith("CE"):
        return always("cross-entropy, a slice of tokens at a time")
    if name == "DPOLoss":
        return objective("dpo")
    return other_task(OTHER_TASK)


def _steps(value: Any, source: Source) -> Outcome:
    if "train.steps" in source.given:
        return always("train.steps says it")
    try:
        epochs = whole(source.get("epochs", 1))
    except BadValueError:
        epochs = 1
    return mapped({"train.steps": positive(value) * max(1, epochs)}, f"steps of {epochs} epochs")


def _epochs(value: Any, source: Source) -> Outcome:
    if source.get("max_steps_per_epoch") is not None:
        return always("max_steps_per_epoch times epochs is train.steps")
    return LOOP["num_train_epochs"].translate(value, source)


def _optimizer(value: Any, source: Source) -> Outcome:
    name = _builder(value).lower()
    return LOOP["optim"].translate("adamw" if name == "adamw" else name, source)


def _schedule(value: Any, _: Source) -> Outcome:
    if "cosine" in _builder(value):
        settings = {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0}
        return mapped(settings, "the same curve after warm-up")
    return dropped("optim.schedule has cosine, linear, wsd and constant")


def _clip(value: Any, _: Source) -> Outcome:
    if value is None:
        return mapped({"optim.clip_norm": None}, "gradients are not clipped")
    return mapped({"optim.clip_norm": number(value)}, "the largest gradient norm")


def _precision(value: Any, _: Source) -> Outcome:
    found = dtype(value)
    settings = {"precision.param": found, "precision.reduce": found}
    if found == "fp32":
        return mapped(settings, "everything is fp32")
    return changed(settings, f"master weights and moments are fp32, where torchtune's are {found}")


def _offload_activations(value: Any, _: Source) -> Outcome:
    return mapped(
        {"memory.offload_activations": 1.0 if flag(value) else 0.0},
        "the share of blocks whose activations are in host memory",
    )


def _offload(value: Any, _: Source) -> Outcome:
    return mapped(
        {"memory.offload": "cpu" if flag(value) else "none"},
        "parameters, gradients and optimizer in host memory, or not",
    )


def _logger(value: Any, _: Source) -> Outcome:
    name = _builder(value)
    if "WandB" in name:
        return mapped({"observe.wandb": "online"}, "curves for W&B")
    if "TensorBoard" in name:
        return mapped({"observe.tensorboard": True}, "curves for TensorBoard")
    return otherwise("events.jsonl holds the curves").translate(value, Source({}))


def _profile(value: Any, _: Source) -> Outcome:
    if not flag(value):
        return always("nothing is profiled")
    return changed({"observe.profile": 5}, "three steps are profiled once, from the fifth on")


def _shard_dim(value: Any, _: Source) -> Outcome:
    size = whole(value)
    if size < 1:
        return always("all ranks that are left shard")
    return mapped({"mesh.shard": size}, "an axis of the mesh")


def _replicate_dim(value: Any, _: Source) -> Outcome:
    size = positive(value)
    if size == 1:
        return always("one replica")
    settings = {"mesh.replicate": size, "shard.strategy": "hybrid_shard"}
    return mapped(settings, "HSDP: an axis of the mesh")


_RULES: dict[str, KeyRule] = {
    "model._component_": KeyRule(_model),
    "model.lora_attn_modules": KeyRule(_targets),
    "model.apply_lora_to_mlp": otherwise("adapter.targets names the layers"),
    "model.apply_lora_to_output": unless("the head has no adapters"),
    "model.lora_rank": to("adapter.rank", positive, "rows of A"),
    "model.lora_alpha": to("adapter.alpha", number, "the product is multiplied by alpha / rank"),
    "model.lora_dropout": to("adapter.dropout", number, "on what goes into A"),
    "model.use_dora": to("adapter.dora", flag, "DoRA"),
    "model.quantize_base": LORA["load_in_4bit"],
    "model.*": drop("model.overrides changes fields of config.json"),
    "checkpointer.checkpoint_dir": KeyRule(_checkpoint_dir),
    "checkpointer.adapter_checkpoint": to("adapter.weights_from", text, "adapters to begin with"),
    "checkpointer.keep_last_n_checkpoints": to("checkpoint.keep", positive, "the oldest go first"),
    "checkpointer.*": otherwise("weights are found in the directory, and saved in the run's"),
    "tokenizer.max_seq_len": to("data.seq_len", positive, "tokens of a sequence"),
    "tokenizer.*": otherwise("the model's own tokenizer is used; data.tokenizer names another"),
    "dataset._component_": KeyRule(_dataset),
    "dataset.source": KeyRule(_files),
    "dataset.data_files": drop("data.path takes files, directories and globs"),
    "dataset.packed": KeyRule(_packed),
    "dataset.split": KeyRule(_split),
    "dataset.name": to("data.name", text, "the configuration of the dataset"),
    "dataset.subset": to("data.name", text, "the configuration of the dataset"),
    "dataset.column": to("data.field", text, "the column of the text"),
    "dataset.train_on_input": unless("of conversations the answers alone are trained on"),
    "dataset.*": drop("records have the keys of data.format; rename others"),
    "datasets": drop("a run has one dataset"),
    "dataset": drop("a run has one dataset"),
    **each(drop("a run has one dataset"), ("datasets[].*", "dataset[].*")),
    "dataset_val.*": otherwise("data.eval_fraction holds records out of the training data"),
    "batch_size_val": otherwise("evaluation takes the micro-batch of training"),
    "run_val_every_n_steps": to("train.eval_every", whole, "steps between evaluations"),
    "dataloader.*": otherwise("the loader reads ahead by itself"),
    "collate_fn": otherwise("sequences are packed, so none is padded"),
    "seed": to("train.seed", whole, "weights, order of data and dropout"),
    "shuffle": to("data.shuffle", flag, "by a seed"),
    "epochs": KeyRule(_epochs),
    "max_steps_per_epoch": KeyRule(_steps),
    "batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "gradient_accumulation_steps": to("train.accumulation", positive, "micro-batches of a step"),
    "optimizer._component_": KeyRule(_optimizer),
    "optimizer.lr": to("optim.lr", number, "the peak rate"),
    "optimizer.weight_decay": nearly("optim.weight_decay", number, "norms and biases are left out"),
    "optimizer.eps": to("optim.eps", number, "Adam's epsilon"),
    "optimizer.betas": to("optim.betas", list, "Adam's two decay rates"),
    "optimizer.fused": otherwise("AdamW is fused where the device has it"),
    "optimizer.*": drop("optim has no setting for it"),
    "optimizer_in_bwd": unless("all gradients are clipped before a step"),
    "lr_scheduler._component_": KeyRule(_schedule),
    "lr_scheduler.num_warmup_steps": to("optim.warmup_steps", whole, "steps of warm-up"),
    "lr_scheduler.*": drop("optim.schedule has cosine, linear, wsd and constant"),
    "loss._component_": KeyRule(_loss),
    "loss.beta": BETA,
    "loss.label_smoothing": SMOOTHING,
    "loss.*": otherwise("cross-entropy over all valid tokens"),
    "clip_grad_norm": KeyRule(_clip, raw=True),
    "compile": to("memory.compile", flag, "each block is compiled by itself"),
    "compile.*": otherwise("memory.compile compiles blocks"),
    "dtype": KeyRule(_precision),
    "enable_activation_checkpointing": LOOP["gradient_checkpointing"],
    "enable_activation_offloading": KeyRule(_offload_activations),
    "ac_mode": otherwise("memory.checkpoint_activations says what is recomputed"),
    "ac_option": otherwise("memory.checkpoint_activations says what is recomputed"),
    **each(KeyRule(_offload), "fsdp_cpu_offload fsdp.cpu_offload"),
    "fsdp_reshard_after_forward": to("shard.reshard_after_forward", flag, "after forward"),
    **each(
        otherwise("embedding and head are units of their own"),
        "custom_sharded_layers memory_efficient_fsdp_wrap",
    ),
    "data_parallel_shard_dim": KeyRule(_shard_dim),
    "data_parallel_replicate_dim": KeyRule(_replicate_dim),
    "tensor_parallel_dim": TENSOR,
    "context_parallel_dim": CONTEXT,
    "tensor_parallel_plan.*": PARTS,
    "metric_logger._component_": KeyRule(_logger),
    "metric_logger.project": to("observe.wandb_project", text, "the project of W&B"),
    "metric_logger.*": otherwise("curves lie in the run directory"),
    "log_every_n_steps": to("observe.log_every", positive, "steps between lines"),
    "log_peak_memory_stats": kept("every line shows memory"),
    "log_level": drop("there is one level of messages"),
    "output_dir": LOOP["output_dir"],
    "resume_from_checkpoint": otherwise("the same command resumes from its run directory"),
    "save_adapter_weights_only": kept("checkpoints of adapters hold adapters alone"),
    **each(
        drop("a run counts steps, not epochs: set checkpoint.every"),
        "save_every_n_epochs save_last_epoch_only epochs_to_save",
    ),
    "save_every_n_steps": to("checkpoint.every", positive, "steps from one to the next"),
    "enable_async_checkpointing": to("checkpoint.asynchronous", flag, "in the background"),
    "profiler.enabled": KeyRule(_profile),
    "profiler.*": otherwise("RUN/profile holds the traces of observe.profile_steps steps"),
    "device": otherwise("cluster.name says which devices there are"),
    "low_cpu_ram": otherwise("each rank reads its own rows of the weights"),
    **each(
        drop("it is a name for other keys of the file"), "name base_model_path model_dir model_name"
    ),
    **DROPS,
}


def _has_optimizer(source: Source) -> bool:
    return isinstance(source.get("optimizer"), dict)


_DEFAULT = "the default of torch's AdamW"
TORCHTUNE = Reader(
    "torchtune",
    "torchtune",
    _RULES,
    (
        Assumed(
            ("optimizer.betas",),
            [0.9, 0.999],
            {"optim.betas": [0.9, 0.999]},
            _DEFAULT,
            _has_optimizer,
        ),
        Assumed(
            ("optimizer.weight_decay",),
            0.01,
            {"optim.weight_decay": 0.01},
            _DEFAULT,
            _has_optimizer,
        ),
        Assumed(
            ("lr_scheduler._component_",),
            "none",
            {"optim.schedule": "constant"},
            "without a scheduler the rate stays",
            _has_optimizer,
        ),
    ),
    prepare=resolve,
)
