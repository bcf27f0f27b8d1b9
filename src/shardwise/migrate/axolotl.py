"""axolotl's YAML, which is flat and built on the Trainer's arguments."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.axolotl_data import DATA
from shardwise.migrate.axolotl_drops import DROPS
from shardwise.migrate.foreign_axes import CONTEXT, EXPERT, TENSOR
from shardwise.migrate.foreign_values import flag, number, positive, text
from shardwise.migrate.key_rules import (
    Assumed,
    KeyRule,
    Reader,
    drop,
    each,
    otherwise,
    task,
    to,
)
from shardwise.migrate.line import Outcome, always, changed, dropped, mapped
from shardwise.migrate.loop_rules import LOOP, half_format
from shardwise.migrate.preferences import (
    BETA,
    DESIRABLE,
    GAMMA,
    NO_ROLLOUTS,
    SMOOTHING,
    UNDESIRABLE,
    objective,
)
from shardwise.migrate.source import Source
from shardwise.migrate.trainer import LORA, TRAINER_ASSUMED, TRAINING


def _adapter(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word == "lora":
        return mapped({"adapter.method": "lora"}, "what is trained")
    if word == "qlora":
        settings = {"adapter.method": "lora", "adapter.base": "nf4"}
        return mapped(settings, "frozen linear layers are in NF4")
    return dropped("adapters are LoRA, rsLoRA or DoRA")


def _all_linear(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return always("lora_target_modules names the layers")
    if source.get("lora_target_modules"):
        return changed({}, "lora_target_modules names the layers")
    return mapped({"adapter.targets": "all-linear"}, "every linear layer but the head")


def _axis(path: str) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        settings: dict[str, Any] = {path: positive(value)}
        if str(source.get("dp_replicate_size", 1)) not in ("1", "None"):
            settings["shard.strategy"] = "hybrid_shard"
        return mapped(settings, "an axis of the mesh")

    return KeyRule(translate)


def _kernel(name: str) -> KeyRule:
    def translate(value: Any, _: Source) -> Outcome:
        if not flag(value):
            return always("it is off in the file")
        if name == "auto":
            return changed({}, "the plan takes the fastest attention that is exact for the model")
        return mapped({"model.attention": name}, "the same kernels")

    return KeyRule(translate)


def _wandb(value: Any, _: Source) -> Outcome:
    settings = {"observe.wandb": "online", "observe.wandb_project": text(value)}
    return mapped(settings, "the curves go to this project")


def _step_batch(value: Any, source: Source) -> Outcome:
    if source.get("micro_batch_size") is not None:
        return dropped("micro_batch_size and gradient_accumulation_steps say it")
    return mapped({"train.micro_batch": positive(value)}, "of one forward pass")


def _offload_activations(value: Any, _: Source) -> Outcome:
    share = 0.0 if str(value).strip().lower() in ("false", "no") else 1.0
    return mapped(
        {"memory.offload_activations": share},
        "the share of blocks whose activations are in host memory",
    )


def _version(value: Any, source: Source) -> Outcome:
    return TRAINING["fsdp_config.fsdp_version"].translate(value, source)


_OWN: dict[str, KeyRule] = {
    "base_model": to("model.name", text, "a hub id or a directory"),
    "revision_of_model": to("model.revision", text, "the revision of the hub"),
    "trust_remote_code": to("model.trust_remote_code", flag, "code that comes with the model"),
    "overrides_of_model_config.*": drop("model.overrides changes fields of config.json"),
    "model_config.output_router_logits": otherwise("train.router_aux_loss asks for that loss"),
    "model_config.*": drop("model.overrides changes fields of config.json"),
    "rl": KeyRule(lambda value, _: objective(value)),
    **each(BETA, "rl_beta dpo_beta orpo_alpha"),
    "simpo_gamma": GAMMA,
    "dpo_label_smoothing": SMOOTHING,
    "kto_desirable_weight": DESIRABLE,
    "kto_undesirable_weight": UNDESIRABLE,
    "adapter": KeyRule(_adapter),
    "bnb_config_kwargs.*": otherwise("four bits are NF4, with one way to keep their scales"),
    "early_stopping_patience": to("train.patience", positive, "evaluations without a gain"),
    "lora_target_linear": KeyRule(_all_linear),
    "lora_model_dir": to("adapter.weights_from", text, "adapters that training begins with"),
    "peft_use_rslora": to("adapter.rslora", flag, "alpha / sqrt(rank)"),
    "peft_use_dora": to("adapter.dora", flag, "DoRA"),
    "micro_batch_size": to("train.micro_batch", positive, "of one forward pass"),
    "batch_size": KeyRule(_step_batch),
    "num_epochs": LOOP["num_train_epochs"],
    "optimizer": LOOP["optim"],
    "lr_scheduler": LOOP["lr_scheduler_type"],
    "cosine_min_lr_ratio": otherwise("optim.min_lr_ratio has it where the schedule is a cosine"),
    "adam_eps": to("optim.eps", number, "Adam's epsilon"),
    "bf16": half_format("bf16"),
    "bfloat16": half_format("bf16"),
    "fp16": half_format("fp16"),
    "float16": half_format("fp16"),
    "float32": otherwise("precision.param is the format of compute"),
    "fp8": KeyRule(
        lambda value, _: (
            mapped({"precision.linear": "float8"}, "float8 matmuls of torchao")
            if flag(value)
            else always("no float8, in the file and here")
        )
    ),
    "fp8_enable_fsdp_float8_all_gather": otherwise("precision.linear=float8 gathers eight bits"),
    "fsdp_version": KeyRule(_version),
    "dp_replicate_size": _axis("mesh.replicate"),
    "dp_shard_size": _axis("mesh.shard"),
    "tensor_parallel_size": TENSOR,
    **each(CONTEXT, "context_parallel_size sequence_parallel_degree"),
    "expert_parallel_size": EXPERT,
    "flash_attention": _kernel("auto"),
    "xformers_attention": _kernel("auto"),
    "sage_attention": _kernel("auto"),
    "sdp_attention": _kernel("sdpa"),
    "flex_attention": _kernel("flex_attention"),
    "eager_attention": _kernel("eager"),
    "activation_offloading": KeyRule(_offload_activations),
    "wandb_project": KeyRule(_wandb),
    "use_tensorboard": to("observe.tensorboard", flag, "curves for TensorBoard"),
    **each(
        task(NO_ROLLOUTS),
        "reward_model process_reward_model trl ebft diffusion do_bench_eval relora",
    ),
    **each(drop(NO_ROLLOUTS), ("trl.*", "ebft.*", "vllm.*", "diffusion.*")),
}
AXOLOTL = Reader(
    "axolotl",
    "axolotl",
    {**TRAINING, **LORA, **DROPS, **DATA, **_OWN},
    (
        Assumed(
            ("lr_scheduler",),
            "cosine",
            {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0},
            "axolotl's default",
        ),
        *(
            assumed
            for assumed in TRAINER_ASSUMED
            if assumed.keys[0] not in ("lr_scheduler_type", "per_device_train_batch_size")
        ),
    ),
    links={"deepspeed": "deepspeed"},
    auto="`auto` leaves it to axolotl; here the plan or the default decides",
)
