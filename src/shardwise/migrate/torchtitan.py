"""torchtitan's TOML: one table for each part of its job."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.datasets import where
from shardwise.migrate.foreign_axes import CONTEXT, EXPERT, TENSOR, pipeline
from shardwise.migrate.foreign_values import dtype, flag, number, one_of, positive, text, whole
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    nearly,
    otherwise,
    to,
    unless,
)
from shardwise.migrate.line import BadValueError, Outcome, always, changed, dropped, mapped
from shardwise.migrate.loop_rules import LOOP
from shardwise.migrate.source import Source

_STEPS, _WARMUP = 10_000, 200  # torchtitan's defaults
# A shape that ships with us, by torchtitan's name and flavor.
_PRESETS = {
    **{("llama3", size): f"llama-3.1-{size.lower()}" for size in ("8B", "70B", "405B")},
    **{
        ("qwen3", size): f"qwen3-{size.lower()}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
    },
}
_DATA = {
    "c4": {"data.source": "datasets", "data.path": "allenai/c4", "data.name": "en"},
}


def _flavor(value: Any, source: Source) -> Outcome:
    name = _PRESETS.get((str(source.get("model.name")), str(value)))
    if name is None:
        return dropped("no preset has this shape: give model=NAME, a directory or a hub id")
    return mapped({"model.name": name}, "a preset with this shape")


def _weights(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return always("the run begins with random weights")
    settings: dict[str, Any] = {"model.weights": "pretrained"}
    if isinstance(assets := source.get("model.hf_assets_path"), str):
        settings["model.weights_from"] = assets
    return mapped(settings, "the first weights are those of Hugging Face")


def _load_path(value: Any, _: Source) -> Outcome:
    return mapped({"model.weights_from": text(value)}, "a checkpoint of DCP, or safetensors")


def _shard_degree(value: Any, source: Source) -> Outcome:
    degree = whole(value)
    if _replicas(source) > 1:
        settings: dict[str, Any] = {"shard.strategy": "hybrid_shard"}
        if degree > 0:
            settings["mesh.shard"] = degree
        return mapped(settings, "HSDP: the shard axis is inside, the replicas outside")
    if degree == 1:
        return mapped({"shard.strategy": "no_shard"}, "nothing is sharded")
    settings = {"shard.strategy": _one_axis(source)}
    return mapped(settings, "all ranks shard" if degree < 1 else "the ranks that shard")


def _one_axis(source: Source) -> str:
    never = str(source.get("parallelism.fsdp_reshard_after_forward")).lower() == "never"
    return "shard_grad_op" if never else "full_shard"


def _replicas(source: Source) -> int:
    try:
        return positive(source.get("parallelism.data_parallel_replicate_degree", 1))
    except BadValueError:
        return 1


def _replicate(value: Any, _: Source) -> Outcome:
    degree = positive(value)
    if degree == 1:
        return always("one replica")
    return mapped({"mesh.replicate": degree}, "an axis of the mesh")


def _reshard(value: Any, source: Source) -> Outcome:
    word = one_of({"default": None, "always": True, "never": False})(value)
    if word is None:
        return always("parameters are freed after forward; the plan may keep them")
    if _replicas(source) > 1:
        return mapped({"shard.reshard_after_forward": word}, "after forward")
    return always("shard.strategy says it")


def _recompute(value: Any, _: Source) -> Outcome:
    mode = one_of({word: word for word in ("none", "full", "selective", "memory_budget")})(value)
    if mode == "memory_budget":
        return changed({}, "the plan chooses what is recomputed, by the memory that there is")
    return mapped({"memory.checkpoint_activations": mode}, "what is recomputed in backward")


def _selective(value: Any, source: Source) -> Outcome:
    if source.get("activation_checkpoint.mode") != "selective":
        return dropped("it belongs to mode = selective")
    if str(value) == "op":
        return always("results of matmuls and attention are kept")
    share = 1 / positive(value)
    return changed({}, f"memory.checkpoint_activations={share:.2f} recomputes that share")


def _batch(value: Any, _: Source) -> Outcome:
    size = whole(value)
    if size < 1:
        return always("the micro-batches of all ranks")
    return mapped({"train.global_batch": size}, "sequences of one step over all ranks")


def _dataset(value: Any, source: Source) -> Outcome:
    if source.get("training.dataset_path") is not None:
        return always("dataset_path says where")
    if str(value) not in _DATA:
        return dropped("write data.source and data.path")
    return mapped(_DATA[str(value)], "the same documents")


def _converters(value: Any, _: Source) -> Outcome:
    words = value if isinstance(value, list) else [value]
    if "quantize.linear.float8" in words or "float8" in words:
        return mapped({"precision.linear": "float8"}, "float8 matmuls of torchao")
    return dropped("matmuls are in precision.param, or in float8") if words else always("none")


def _schedule(value: Any, source: Source) -> Outcome:
    word = one_of({"linear": "linear", "cosine": "cosine", "sqrt": None})(value)
    if source.get("lr_scheduler.decay_ratio") is not None:
        return changed({}, "decay_ratio gives the rate a stable phase, and wsd decays linearly")
    if word is None:
        return dropped("optim.schedule has cosine, linear, wsd and constant")
    return mapped({"optim.schedule": word}, "the same curve after warm-up")


def _decay(value: Any, source: Source) -> Outcome:
    ratio = number(value)
    if ratio == 0:
        return mapped({"optim.schedule": "constant"}, "the rate does not fall")
    steps = whole(source.given.get("train.steps", source.get("training.steps", _STEPS)))
    warmup = whole(source.get("lr_scheduler.warmup_steps", _WARMUP))
    settings: dict[str, Any] = {"optim.schedule": "wsd"}
    settings["optim.decay_steps"] = max(1, min(round(ratio * steps), steps - warmup))
    return mapped(settings, "the last steps, in which the rate falls")


def _saves(value: Any, _: Source) -> Outcome:
    if flag(value):
        return always("checkpoints are always on")
    return mapped({"checkpoint.every": 0}, "only at the end")


def _interval(value: Any, source: Source) -> Outcome:
    if str(source.get("checkpoint.enable", False)).lower() != "true":
        return dropped("checkpoints are off in the file")
    return mapped({"checkpoint.every": positive(value)}, "steps from one to the next")


def _wandb(value: Any, _: Source) -> Outcome:
    return mapped({"observe.wandb": "online" if flag(value) else "off"}, "curves for W&B")


def _profile(value: Any, _: Source) -> Outcome:
    if not flag(value):
        return always("nothing is profiled")
    return changed({"observe.profile": 5}, "three steps are profiled once, from the fifth on")


def _components(value: Any, _: Source) -> Outcome:
    return changed({}, "memory.compile compiles blocks; memory.loss has kernels of its own")


def _beta(index: int) -> KeyRule:
    def translate(_value: Any, source: Source) -> Outcome:
        pair = [source.get("optimizer.beta1", 0.9), source.get("optimizer.beta2", 0.95)]
        number(pair[index])
        return mapped({"optim.betas": [number(beta) for beta in pair]}, "Adam's two decay rates")

    return KeyRule(translate)


_RULES: dict[str, KeyRule] = {
    "model.name": otherwise("model.flavor and hf_assets_path say which model it is"),
    "model.flavor": KeyRule(_flavor),
    "model.hf_assets_path": to("data.tokenizer", text, "the directory of the tokenizer"),
    "model.tokenizer_path": to("data.tokenizer", text, "the directory of the tokenizer"),
    "model.converters": KeyRule(_converters),
    "model.*": drop("model.overrides changes fields of config.json"),
    "hf_transformers.model": to("model.name", text, "a hub id"),
    "training.steps": to("train.steps", positive, "optimizer steps of the whole run"),
    "training.local_batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "training.batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "training.global_batch_size": KeyRule(_batch),
    "training.seq_len": to("data.seq_len", positive, "tokens of a sequence"),
    "training.max_norm": to("optim.clip_norm", number, "the largest gradient norm"),
    "training.dataset": KeyRule(_dataset),
    "training.dataset_path": KeyRule(
        lambda value, _: mapped(where(value), "a directory, a hub id, or a file by its suffix")
    ),
    "training.enable_cpu_offload": KeyRule(
        lambda value, _: mapped(
            {"memory.offload": "cpu" if flag(value) else "none"},
            "parameters, gradients and optimizer in host memory, or not",
        )
    ),
    "training.dtype": unless("master weights are fp32", "float32"),
    "training.mixed_precision_param": to("precision.param", dtype, "the format of compute"),
    "training.mixed_precision_reduce": to("precision.reduce", dtype, "of the reduction"),
    "training.gc_freq": to("train.gc_every", positive, "steps between collections"),
    "training.seed": to("train.seed", whole, "weights, order of data and dropout"),
    "training.deterministic": to("train.deterministic", flag, "deterministic algorithms"),
    "training.compile": to("memory.compile", flag, "each block is compiled by itself"),
    "training.*": drop("there is no counterpart"),
    "debug.seed": to("train.seed", whole, "weights, order of data and dropout"),
    "debug.deterministic": to("train.deterministic", flag, "deterministic algorithms"),
    "debug.*": drop("there is no counterpart"),
    "optimizer.name": LOOP["optim"],
    "optimizer.lr": to("optim.lr", number, "the peak rate"),
    "optimizer.beta1": _beta(0),
    "optimizer.beta2": _beta(1),
    "optimizer.eps": to("optim.eps", number, "Adam's epsilon"),
    "optimizer.weight_decay": nearly("optim.weight_decay", number, "norms and biases are left out"),
    "optimizer.implementation": otherwise("AdamW is fused where the device has it"),
    "optimizer.early_step_in_backward": unless("all gradients are clipped before a step"),
    "lr_scheduler.warmup_steps": to("optim.warmup_steps", whole, "steps of warm-up"),
    "lr_scheduler.decay_type": KeyRule(_schedule),
    "lr_scheduler.decay_ratio": KeyRule(_decay),
    "lr_scheduler.min_lr_factor": to("optim.min_lr_ratio", number, "the last rate"),
    "lr_scheduler.lr_min": to("optim.min_lr_ratio", number, "the last rate"),
    "lr_scheduler.total_steps": otherwise("the schedule spans train.steps"),
    "parallelism.data_parallel_shard_degree": KeyRule(_shard_degree),
    "parallelism.data_parallel_replicate_degree": KeyRule(_replicate),
    "parallelism.fsdp_reshard_after_forward": KeyRule(_reshard),
    "parallelism.tensor_parallel_degree": TENSOR,
    "parallelism.context_parallel_degree": CONTEXT,
    "parallelism.expert_parallel_degree": EXPERT,
    "parallelism.expert_tensor_parallel_degree": unless("experts are not cut into columns", 1),
    "parallelism.enable_async_tensor_parallel": unless("a matmul waits for what it gathers"),
    **pipeline("pipeline_parallel_degree", "parallelism."),
    "parallelism.*": drop("there is no counterpart"),
    "activation_checkpoint.mode": KeyRule(_recompute),
    "activation_checkpoint.selective_ac_option": KeyRule(_selective),
    "activation_checkpoint.*": drop("memory.checkpoint_activations says what is recomputed"),
    "compile.enable": to("memory.compile", flag, "each block is compiled by itself"),
    "compile.components": KeyRule(_components),
    "compile.*": drop("torch.compile's own defaults are used"),
    "checkpoint.enable": KeyRule(_saves),
    "checkpoint.interval": KeyRule(_interval),
    "checkpoint.keep_latest_k": to("checkpoint.keep", positive, "the oldest go first"),
    "checkpoint.async_mode": KeyRule(
        lambda value, _: mapped(
            {"checkpoint.asynchronous": str(value).lower() != "disabled"}, "in the background"
        )
    ),
    "checkpoint.initial_load_path": KeyRule(_load_path),
    "checkpoint.initial_load_in_hf": KeyRule(_weights),
    "checkpoint.*": otherwise(
        "checkpoints are in the run directory; `shardwise export` writes HF's"
    ),
    "metrics.log_freq": to("observe.log_every", positive, "steps between lines"),
    "metrics.enable_tensorboard": to("observe.tensorboard", flag, "curves for TensorBoard"),
    "metrics.enable_wandb": KeyRule(_wandb),
    "metrics.*": otherwise("events.jsonl and sinks lie in the run directory"),
    "profiling.enable_profiling": KeyRule(_profile),
    "profiling.enable_memory_snapshot": to("observe.memory_history", flag, "allocations"),
    "profiling.*": otherwise("RUN/profile holds the traces of observe.profile_steps steps"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": otherwise(
        "precision.linear=float8 gathers eight bits, float8_rowwise does not"
    ),
    "quantize.linear.float8.*": otherwise("float8 is torchao's, for blocks and not for the head"),
    "quantize.*": drop("there are no MX formats and no float8 experts"),
    "float8.*": otherwise("float8 is torchao's, for blocks and not for the head"),
    "validation.enable": KeyRule(
        lambda value, _: (
            changed({"data.eval_fraction": 0.01}, "a hundredth of the documents is held out")
            if flag(value)
            else always("nothing is held out")
        )
    ),
    "validation.freq": KeyRule(
        lambda value, source: (
            mapped({"train.eval_every": positive(value)}, "steps between evaluations")
            if source.get("validation.enable") is True
            else dropped("validation is off in the file")
        )
    ),
    "validation.*": otherwise("data.eval_sequences says how many held-out sequences are read"),
    "job.dump_folder": to("runs_dir", text, "the directory of all runs"),
    "job.*": drop("the run's name is that of its directory"),
    "comm.train_timeout_seconds": otherwise("train.hang_timeout_s counts seconds without a step"),
    "comm.*": drop("launchers and ranks watch each other by themselves"),
    "memory_estimation.*": otherwise("`shardwise plan` and `shardwise tunnel` say it"),
    "fault_tolerance.enable": unless("ranks that died are started again from a checkpoint"),
    "fault_tolerance.*": drop("ranks that died are started again from a checkpoint"),
    "experimental.*": drop("no code beside the model's is run"),
    **each(
        drop("only causal language models are trained"),
        ("encoder.*", "inference.*", "data.*", "vision.*"),
    ),
}
_DEFAULT = "torchtitan's default"
TORCHTITAN = Reader(
    "torchtitan",
    "torchtitan",
    _RULES,
    (
        Assumed(("optimizer.lr",), 8e-4, {"optim.lr": 8e-4}, _DEFAULT),
        Assumed(("lr_scheduler.warmup_steps",), _WARMUP, {"optim.warmup_steps": _WARMUP}, _DEFAULT),
        Assumed(("lr_scheduler.decay_type",), "linear", {"optim.schedule": "linear"}, _DEFAULT),
        Assumed(("lr_scheduler.min_lr_factor",), 0.0, {"optim.min_lr_ratio": 0.0}, _DEFAULT),
        Assumed(("training.steps",), _STEPS, {"train.steps": _STEPS}, _DEFAULT),
        Assumed(
            ("training.mixed_precision_param",), "bfloat16", {"precision.param": "bf16"}, _DEFAULT
        ),
        Assumed(
            ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"),
            False,
            {"model.weights": "random"},
            "torchtitan begins with random weights",
        ),
    ),
)
