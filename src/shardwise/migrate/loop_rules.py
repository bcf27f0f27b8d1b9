"""Rules of the training loop that the HF Trainer and the tools built on it share."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from shardwise.config.schema_text import show_value
from shardwise.files import why_no_path
from shardwise.migrate.foreign_values import flag, number, one_of, positive, text, whole
from shardwise.migrate.key_rules import KeyRule
from shardwise.migrate.line import BadValueError, Outcome, always, changed, dropped, mapped
from shardwise.migrate.source import Source

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "rex": None,
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_SCALED = "whose update may be scaled otherwise: check optim.lr"
_OTHER_OPTIMIZERS = {
    "muon": f"torch's Muon, {_SCALED}",
    "adafactor": f"torch's Adafactor, {_SCALED}",
    "lion": "Lion, whose moment is fp32 and on the device",
}
_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_4", "flex_attention")


def num_steps(source: Source) -> int | None:
    """The steps of the run, where the user or the file gives them."""
    for value in (source.given.get("train.steps"), source.get("max_steps")):
        try:
            if value is not None and whole(value) > 0:
                return whole(value)
        except BadValueError:
            continue
    return None


def _max_steps(value: Any, _: Source) -> Outcome:
    steps = whole(value)
    if steps <= 0:
        return always("the file counts epochs")
    return mapped({"train.steps": steps}, "optimizer steps of the whole run")


def _epochs(value: Any, source: Source) -> Outcome:
    epochs = number(value)
    if num_steps(source) is not None:
        return always("the number of steps decides")
    if epochs <= 0:
        raise BadValueError(f"{show_value(value)} is no number of passes")
    return mapped({"train.epochs": epochs}, "passes over the training data")


def _warmup_ratio(value: Any, source: Source) -> Outcome:
    ratio, steps = number(value), num_steps(source)
    if not 0 <= ratio <= 1:
        raise BadValueError(f"{show_value(value)} is no share of a run")
    if ratio == 0:
        return mapped({"optim.warmup_steps": 0}, "no warm-up")
    if steps is None:
        return dropped(
            "it is a share of the steps, which the file does not say: "
            "give train.steps, or set optim.warmup_steps"
        )
    settings = {"optim.warmup_steps": round(ratio * steps)}
    return mapped(settings, f"this share of {steps} steps")


def _warmup(value: Any, source: Source) -> Outcome:
    if 0 < number(value) < 1:
        return _warmup_ratio(value, source)
    return mapped({"optim.warmup_steps": whole(value)}, "steps over which the rate rises from 0")


def _schedule(value: Any, source: Source) -> Outcome:
    word = str(value).strip().lower()
    name = _SCHEDULES.get(word)
    if name is None:
        return dropped("optim.schedule has cosine, linear, wsd and constant alone")
    settings: dict[str, Any] = {"optim.schedule": name}
    if name in ("linear", "cosine"):
        settings["optim.min_lr_ratio"] = _floor(source)
    return mapped(settings, "the same curve after warm-up")


def _floor(source: Source) -> float:
    keys = ("lr_scheduler_kwargs.min_lr_rate", "cosine_min_lr_ratio")
    for key in keys:
        try:
            return number(source.get(key))
        except BadValueError:
            continue
    return 0.0


def clip(value: Any, _: Source) -> Outcome:
    """A largest norm, of which 0 stands for none."""
    norm = number(value)
    if norm == 0:
        return mapped({"optim.clip_norm": None}, "gradients are not clipped")
    return mapped({"optim.clip_norm": norm}, "the largest gradient norm")


def _optimizer(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word in _ADAMW:
        return always("AdamW, fused where the device has it")
    if "adamw" in word and ("8bit" in word or "paged" in word):
        return _small_adamw(has_8_bits="8bit" in word, is_paged="paged" in word)
    if "adamw" in word:
        return changed({}, "AdamW with fp32 moments; optim.state=bf16 halves their memory")
    return other_optimizer(word)


def other_optimizer(word: str) -> Outcome:
    """One that is not AdamW, by a name that may say more, such as `fusedlion`."""
    for name, why in _OTHER_OPTIMIZERS.items():
        if name in word:
            return changed({"optim.name": name}, why)
    return changed({}, "AdamW is used; rates that suit another optimizer may not suit it")


def _small_adamw(*, has_8_bits: bool, is_paged: bool) -> Outcome:
    if not has_8_bits:
        why = "AdamW's moments are always in host memory, not only where the device is full"
        return changed({"memory.offload_optimizer": True}, why)
    if is_paged:
        why = "AdamW's moments are in eight bits, and stay on the device"
        return changed({"optim.state": "int8"}, why)
    return mapped({"optim.state": "int8"}, "AdamW's moments are in eight bits")


def _beta(index: int, other: str, default: float) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        betas = [number(value), number(source.get(other, default))]
        return mapped({"optim.betas": betas[:: -1 if index else 1]}, "Adam's two decay rates")

    return KeyRule(translate)


def _output(value: Any, _: Source) -> Outcome:
    path = PurePath(text(value))
    bad = why_no_path(str(path)) or not path.name or path.name == ".."
    if bad or not path.name.isprintable():
        raise BadValueError(f"{show_value(value)} names no directory")
    settings = {"name": path.name, "runs_dir": str(path.parent)}
    return changed(settings, "the run directory, with checkpoints, plan and events")


def _recompute(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word == "unsloth":
        return changed({"memory.checkpoint_activations": "full"}, "each block is recomputed")
    if word.startswith("offload"):
        settings = {"memory.checkpoint_activations": "full", "memory.offload_activations": 1.0}
        return changed(settings, "blocks are recomputed, and their inputs are in host memory")
    full = flag(value)
    why = "blocks are recomputed in backward" if full else "nothing is recomputed"
    return mapped({"memory.checkpoint_activations": "full" if full else "none"}, why)


def _report(value: Any, _: Source) -> Outcome:
    sinks = {str(item).lower() for item in (value if isinstance(value, list) else [value])}
    settings: dict[str, Any] = {}
    if sinks & {"tensorboard", "all"}:
        settings["observe.tensorboard"] = True
    if sinks & {"wandb", "all"}:
        settings["observe.wandb"] = "online"
    if sinks - {"tensorboard", "wandb", "none"}:
        return changed(settings, "events.jsonl, TensorBoard, W&B and Prometheus are the sinks")
    return mapped(settings, "where curves go besides events.jsonl")


def _every(path: str) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        steps = num_steps(source)
        if 0 < number(value) < 1:
            if steps is None:
                return dropped(
                    f"it is a share of all steps, which the file does not say: set {path}"
                )
            return mapped({path: max(1, round(number(value) * steps))}, "this share of all steps")
        return mapped({path: whole(value)}, "steps from one to the next")

    return KeyRule(translate)


def _strategy(path: str, keys: tuple[str, ...]) -> KeyRule:
    """`steps` leaves it to its number of steps, `no` turns it off, epochs we do not count."""

    def translate(value: Any, source: Source) -> Outcome:
        word = str(value).strip().lower()
        if word in ("no", "false"):
            return mapped({path: 0}, "only at the end")
        if word == "steps":
            said = any(source.get(key) is not None for key in keys)
            return always("every so many steps") if said else changed({}, f"{path} says how often")
        return dropped(f"a run counts steps, not epochs: set {path}")

    return KeyRule(translate)


def _attention(value: Any, _: Source) -> Outcome:
    word = str(value).strip().lower()
    if word in _ATTENTION:
        return mapped({"model.attention": word}, "the same kernels")
    return changed({}, "the plan takes the fastest attention that is exact for the model")


LOOP: dict[str, KeyRule] = {
    "max_steps": KeyRule(_max_steps),
    "num_train_epochs": KeyRule(_epochs),
    "warmup_steps": KeyRule(_warmup),
    "warmup_ratio": KeyRule(_warmup_ratio),
    "lr_scheduler_type": KeyRule(_schedule),
    "max_grad_norm": KeyRule(clip),
    "optim": KeyRule(_optimizer),
    "adam_beta1": _beta(0, "adam_beta2", 0.999),
    "adam_beta2": _beta(1, "adam_beta1", 0.9),
    "output_dir": KeyRule(_output),
    "gradient_checkpointing": KeyRule(_recompute),
    "report_to": KeyRule(_report),
    "save_steps": _every("checkpoint.every"),
    "eval_steps": _every("train.eval_every"),
    "logging_steps": _every("observe.log_every"),
    "save_strategy": _strategy("checkpoint.every", ("save_steps",)),
    "eval_strategy": _strategy("train.eval_every", ("eval_steps",)),
    "attn_implementation": KeyRule(_attention),
}


def half_format(name: str) -> KeyRule:
    """`bf16: true` and `fp16: true`. FSDP reduces in the same format, DDP's autocast in fp32."""

    def translate(value: Any, source: Source) -> Outcome:
        word = str(value).strip().lower()
        if word in ("auto", "full"):
            return mapped({"precision.param": "auto"}, "bf16 where the hardware computes it")
        if value is None or not flag(value):
            return always(f"no {name}, in the file and here")
        if source.get("fsdp") or source.get("fsdp_config") or source.get("deepspeed"):
            why = f"gradients are reduced in {name} as in FSDP; precision.reduce=fp32 is safer"
            return mapped({"precision.param": name, "precision.reduce": name}, why)
        return mapped({"precision.param": name}, "gradients are reduced in fp32")

    return KeyRule(translate, raw=True)


def lora_targets(value: Any, _: Source) -> Outcome:
    """PEFT's target modules: names, `all-linear`, or one regular expression."""
    if isinstance(value, str) and value.strip().lower() in ("all", "all-linear"):
        return mapped({"adapter.targets": "all-linear"}, "every linear layer but the head")
    if isinstance(value, str) and any(sign in value for sign in "\\()|^$+?"):
        return dropped("it is a regular expression; adapter.targets takes names such as *_proj")
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise BadValueError(f"{show_value(value)} is no list of names")
    return mapped({"adapter.targets": [word.strip() for word in words]}, "layers with adapters")


def sized(path: str, why: str) -> KeyRule:
    """A whole number of at least one."""
    return KeyRule(lambda value, _: mapped({path: positive(value)}, why))


def spoken(path: str, words: dict[str, Any], why: str) -> KeyRule:
    """One of a fixed set of words."""
    return KeyRule(lambda value, _: mapped({path: one_of(words)(value)}, why))
