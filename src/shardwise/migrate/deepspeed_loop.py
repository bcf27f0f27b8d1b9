"""What DeepSpeed's JSON says about the loop: batch, optimizer, schedule, clipping, logging."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_values import flag, number, one_of, positive, whole
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    drop,
    each,
    kept,
    nearly,
    otherwise,
    to,
    unless,
)
from shardwise.migrate.line import BadValueError, Outcome, always, changed, dropped, mapped
from shardwise.migrate.loop_rules import clip, other_optimizer
from shardwise.migrate.source import Source

_SCHEDULES = {
    "warmuplr": ("constant", 0.0),
    "warmupdecaylr": ("linear", 0.0),
    "warmupcosinelr": ("cosine", 0.0001),
}
_ADAMW = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")


def _optimizer(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word in _ADAMW:
        return always("AdamW, which DeepSpeed's Adam is unless adam_w_mode is false")
    return other_optimizer(word)


def _decoupled(value: Any, _: Source) -> Outcome:
    if flag(value):
        return always("weight decay is decoupled")
    return changed({}, "weight decay is always decoupled, as in AdamW")


def _betas(value: Any, _: Source) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        raise BadValueError("Adam has two betas")
    return mapped({"optim.betas": [number(beta) for beta in value]}, "Adam's two decay rates")


def _schedule(value: Any, source: Source) -> Outcome:
    known = _SCHEDULES.get(str(value).strip().lower())
    if known is None:
        return dropped("optim.schedule has cosine, linear, wsd and constant alone")
    name, ratio = known
    if name == "cosine":
        ratio = number(source.get("scheduler.params.cos_min_ratio", ratio))
    settings: dict[str, Any] = {"optim.schedule": name}
    if name != "constant":
        settings["optim.min_lr_ratio"] = ratio
    return mapped(settings, "the same curve after warm-up")


def _first_rate(value: Any, _: Source) -> Outcome:
    if number(value) == 0:
        return always("warm-up begins at 0")
    return changed({}, "warm-up begins at 0")


def _peak_rate(value: Any, source: Source) -> Outcome:
    rate = number(value)
    said = source.get("optimizer.params.lr")
    if said is not None and said != "auto":
        return always("the same peak as optimizer.params.lr")
    return mapped({"optim.lr": rate}, "the peak rate")


LOOP_RULES: dict[str, KeyRule] = {
    "train_batch_size": to("train.global_batch", positive, "sequences of one step over all ranks"),
    "train_micro_batch_size_per_gpu": to("train.micro_batch", positive, "of one forward pass"),
    "gradient_accumulation_steps": to("train.accumulation", positive, "micro-batches of a step"),
    "gradient_clipping": KeyRule(clip),
    "optimizer.type": KeyRule(_optimizer),
    "optimizer.params.lr": to("optim.lr", number, "the peak rate"),
    "optimizer.params.betas": KeyRule(_betas),
    "optimizer.params.eps": to("optim.eps", number, "Adam's epsilon"),
    "optimizer.params.weight_decay": nearly(
        "optim.weight_decay", number, "norms and biases are left out, as scripts usually do"
    ),
    "optimizer.params.adam_w_mode": KeyRule(_decoupled),
    "optimizer.params.torch_adam": kept("AdamW is torch's, or our own fused kernel"),
    "optimizer.params.fused": kept("AdamW is fused where the device has it"),
    "optimizer.params.bias_correction": otherwise("Adam's moments are always corrected"),
    "optimizer.params.*": drop("optim has no setting for it"),
    "optimizer.legacy_fusion": otherwise("AdamW is fused where the device has it"),
    "scheduler.type": KeyRule(_schedule),
    "scheduler.params.warmup_num_steps": to("optim.warmup_steps", whole, "steps of warm-up"),
    "scheduler.params.total_num_steps": to("train.steps", positive, "steps of the whole run"),
    "scheduler.params.warmup_max_lr": KeyRule(_peak_rate),
    "scheduler.params.warmup_min_lr": KeyRule(_first_rate),
    "scheduler.params.warmup_min_ratio": KeyRule(_first_rate),
    "scheduler.params.cos_min_ratio": kept("the last rate; optim.min_lr_ratio has it"),
    "scheduler.params.warmup_type": KeyRule(
        lambda value, _: (
            always("warm-up is linear")
            if one_of({"linear": True, "log": False})(value)
            else changed({}, "warm-up is linear")
        )
    ),
    "scheduler.params.*": drop("it belongs to a schedule that is not here"),
    "steps_per_print": nearly("observe.log_every", positive, "steps between lines"),
    "wall_clock_breakdown": unless("observe.collectives and observe.profile say where time goes"),
    "tensorboard.enabled": to("observe.tensorboard", flag, "curves for TensorBoard"),
    "tensorboard.*": otherwise("curves lie in RUN/tensorboard"),
    "wandb.enabled": KeyRule(
        lambda value, _: mapped(
            {"observe.wandb": "online" if flag(value) else "off"}, "curves for W&B"
        )
    ),
    "wandb.project": to("observe.wandb_project", str, "the project of W&B"),
    "wandb.*": otherwise("the run's name is that of its directory"),
    **each(
        drop("events.jsonl, TensorBoard, W&B and Prometheus are the sinks"),
        ("csv_monitor.*", "comet.*", "monitor_config.*"),
    ),
    **each(
        otherwise("`shardwise profile` and MFU say it"),
        ("flops_profiler.*", "comms_logger.*", "comms_config.*"),
    ),
    "dump_state": unless("plan.json and events.jsonl say it"),
    "log_level": drop("there is one level of messages"),
    "prescale_gradients": otherwise("gradients are sums over the tokens of all ranks"),
    "gradient_predivide_factor": otherwise("gradients are sums over the tokens of all ranks"),
    "gradient_allreduce_op": otherwise("gradients are sums over the tokens of all ranks"),
    "sparse_gradients": unless("gradients are dense"),
    "disable_allgather": otherwise("parameters are always all-gathered"),
    "dataloader_drop_last": otherwise("data is read around its end, so no batch is short"),
    "checkpoint.*": otherwise("checkpoints are sharded, hashed and loadable on any mesh"),
    "cuda_visible_devices": drop("set CUDA_VISIBLE_DEVICES in the environment"),
    "managed_gradient_accumulation": otherwise("train.accumulation counts micro-batches"),
}


def _has_optimizer(source: Source) -> bool:
    return isinstance(source.get("optimizer"), dict)


LOOP_ASSUMED: tuple[Assumed, ...] = (
    Assumed(
        ("optimizer.params.betas",),
        [0.9, 0.999],
        {"optim.betas": [0.9, 0.999]},
        "the default of DeepSpeed's Adam",
        _has_optimizer,
    ),
    Assumed(
        ("optimizer.params.weight_decay",),
        0,
        {"optim.weight_decay": 0.0},
        "the default of DeepSpeed's Adam",
        _has_optimizer,
    ),
    Assumed(
        ("scheduler.type",),
        "none",
        {"optim.schedule": "constant"},
        "without a scheduler in the file the rate stays, unless the script changes it",
        _has_optimizer,
    ),
    Assumed(
        ("gradient_clipping",),
        0,
        {"optim.clip_norm": None},
        "DeepSpeed does not clip by itself",
    ),
)
