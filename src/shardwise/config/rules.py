"""Rules about values, as rows. They need neither hardware nor a model.

A rule is only about what the user said. Whatever is `auto` or unset belongs to the planner, and
passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from shardwise.config.adapter_rules import ADAPTER_RULES
from shardwise.config.data_rules import DATA_RULES
from shardwise.config.diloco_rules import DILOCO_RULES
from shardwise.config.epoch_rules import EPOCH_RULES, knows_steps
from shardwise.config.eval_rules import EVAL_RULES
from shardwise.config.held_out import HELD_OUT_RULES
from shardwise.config.kubernetes_rules import KUBERNETES_RULES
from shardwise.config.launch_rules import LAUNCH_RULES
from shardwise.config.mixed_datasets import MIXTURE_RULES
from shardwise.config.observe_rules import OBSERVE_RULES
from shardwise.config.optimizer_rules import OPTIMIZER_RULES
from shardwise.config.paging_rules import PAGING_RULES
from shardwise.config.preference_rules import PREFERENCE_RULES
from shardwise.config.rule import Rule, above_zero, at_least, path_rule, raise_faults, within
from shardwise.config.schema import FLOAT8_FORMATS, RunConfig
from shardwise.config.schema_text import value_at
from shardwise.config.skypilot_rules import SKYPILOT_RULES
from shardwise.files import why_no_path


def validate_rules(config: RunConfig, place_of: Callable[[str], str] = lambda _: "") -> None:
    """Raise one UserError that names every broken rule.

    `place_of` says where a field such as `optim.lr` was written. A config that was not read from a
    file has no places.
    """
    broken = [rule for rule in RULES if not rule.holds(config)]
    if broken:
        raise_faults([rule.fault(config, place_of(rule.field)) for rule in broken])


def _wsd_phases_fit(c: RunConfig) -> bool:
    decay = c.optim.decay_steps
    is_open = c.optim.schedule != "wsd" or isinstance(decay, str) or not knows_steps(c)
    return is_open or c.optim.warmup_steps + int(decay) <= c.train.steps


def _batch_divides(c: RunConfig) -> bool:
    whole, micro, passes = c.train.global_batch, c.train.micro_batch, c.train.accumulation
    if isinstance(whole, str) or isinstance(micro, str) or isinstance(passes, str):
        return True
    return micro * passes < 1 or whole % (micro * passes) == 0


def _code_is_pinned(c: RunConfig) -> bool:
    model = c.model
    return not model.trust_remote_code or model.revision is not None or Path(model.name).is_dir()


def _prefetch_rule(direction: str) -> Rule:
    field = f"shard.{direction}_prefetch"

    def holds(config: RunConfig) -> bool:
        depth, limit = value_at(config, field), config.shard.all_gather_limit
        return isinstance(depth, str) or isinstance(limit, str) or depth <= max(0, limit - 1)

    return Rule(
        f"{field}-limit",
        field,
        holds,
        "shard.all_gather_limit={c.shard.all_gather_limit} counts the unit in use too, so one "
        "less than that can be gathered ahead",
        lambda config: (
            f"write shard.all_gather_limit={value_at(config, field) + 1}, or leave {field} out"
        ),
    )


def _phases_that_fit(c: RunConfig) -> str:
    left = c.train.steps - c.optim.warmup_steps
    if left < 1:
        return "write optim.warmup_steps=0 optim.decay_steps=auto"
    return f"write optim.decay_steps={left} or less, or optim.warmup_steps=0 optim.decay_steps=auto"


def _whole_sixteens(c: RunConfig) -> str:
    length = -(-c.data.seq_len // 16) * 16
    return f"write a multiple of 16, such as data.seq_len={length}, or leave precision.linear out"


def _without_bars(c: RunConfig) -> str:
    """What must change for our AdamW to be used."""
    bars = {
        "optim.fused=auto": c.optim.fused is False,
        "memory.offload=none": c.memory.offload != "none",
        "train.kernels=auto": c.train.kernels == "torch",
    }
    needed = " ".join(setting for setting, barred in bars.items() if barred)
    return f"leave optim.state out, or write {needed}"


def _is_float8(c: RunConfig) -> bool:
    return c.precision.linear in FLOAT8_FORMATS


def _may_use_own_adamw(c: RunConfig) -> bool:
    on_device = c.memory.offload == "none"
    return on_device and c.optim.fused is not False and c.train.kernels != "torch"


def _is_pattern(text: str) -> bool:
    try:
        return bool(re.compile(text))
    except re.error:
        return False


RULES: tuple[Rule, ...] = (
    Rule(
        "name-is-a-directory-name",
        "name",
        lambda c: c.name not in ("", ".", "..") and "/" not in c.name,
        "it names one directory inside runs_dir",
        "write a plain name, such as name=first-run; runs_dir is the place of all runs",
    ),
    # It is shown on terminals and stands in the commands that are printed to be typed.
    Rule(
        "name-is-printable",
        "name",
        lambda c: c.name.isprintable() or why_no_path(c.name) is not None,
        "it holds a character that cannot be printed, such as a newline",
        "write a plain name, such as name=first-run",
    ),
    *map(
        path_rule,
        (
            *("name", "runs_dir", "model.name", "model.weights_from", "data.path"),
            "data.eval_path",
            *("data.tokenizer", "data.chat_template", "cluster.prices"),
        ),
    ),
    *at_least(1, "train.steps", "train.global_batch", "train.micro_batch", "train.accumulation"),
    *at_least(
        1,
        "train.gc_every",
        "observe.log_every",
        "observe.profile",
        "observe.profile_steps",
        "checkpoint.keep",
        "data.eval_sequences",
    ),
    *at_least(1, "mesh.replicate", "mesh.shard", "cluster.nvlink_domain", "optim.decay_steps"),
    *at_least(1, "mesh.tensor", "mesh.context", "mesh.expert"),
    *at_least(1, "mesh.pipeline", "mesh.pipeline_chunks"),
    *at_least(0, "cluster.usd_per_gpu_hour"),
    *at_least(1, "shard.all_gather_limit", "shard.unit_min_params", "memory.loss_chunk_tokens"),
    *at_least(2, "data.seq_len"),
    *at_least(16, "precision.float8_min_features"),
    *at_least(0, "shard.forward_prefetch", "shard.backward_prefetch", "data.max_corrupt"),
    *at_least(0, "checkpoint.every", "train.seed", "optim.warmup_steps"),
    *at_least(0, "optim.weight_decay", "train.max_nonfinite", "train.max_restarts"),
    *at_least(0, "train.compare_replicas_every"),
    *at_least(0, "train.router_aux_loss", "train.router_z_loss", "checkpoint.wait_for_room_s"),
    # Far above any device, so that no product of them overflows.
    above_zero("cluster.peak_tflops", "989.4", 1e6),
    above_zero("cluster.gpu_gib", "96", 1e6),
    above_zero("cluster.gpu_gbps", "1600", 1e6),
    above_zero("train.hang_timeout_s", "900"),
    above_zero("optim.lr", "3e-4"),
    above_zero("optim.eps", "1e-8"),
    above_zero("optim.clip_norm", "1.0 (null turns clipping off)"),
    above_zero("precision.loss_scale", "65536"),
    within("data.eval_fraction", 0, 0.5),
    within("memory.checkpoint_activations", 0, 1),
    within("memory.offload_activations", 0, 1),
    within("optim.min_lr_ratio", 0, 1),
    within("gates.max_exposed", 0, 1),
    Rule(
        "betas-range",
        "optim.betas",
        lambda c: all(0 <= beta < 1 for beta in c.optim.betas),
        "each must be at least 0 and below 1",
        "a usual value is optim.betas=[0.9,0.95]",
    ),
    Rule(
        "warmup-within-steps",
        "optim.warmup_steps",
        lambda c: not knows_steps(c) or c.optim.warmup_steps <= c.train.steps,
        "the whole run has train.steps={c.train.steps}",
        "write optim.warmup_steps={c.train.steps} or less, or "
        "train.steps={c.optim.warmup_steps} or more",
    ),
    Rule(
        "decay-needs-wsd",
        "optim.decay_steps",
        lambda c: c.optim.schedule == "wsd" or c.optim.decay_steps == "auto",
        "optim.schedule={c.optim.schedule} has no decay phase of its own",
        "write optim.schedule=wsd, or leave optim.decay_steps out",
    ),
    Rule(
        "wsd-phases-fit",
        "optim.decay_steps",
        _wsd_phases_fit,
        "with optim.warmup_steps={c.optim.warmup_steps} that is more than "
        "train.steps={c.train.steps}",
        _phases_that_fit,
    ),
    Rule(
        "stop-within-steps",
        "train.stop_after",
        lambda c: (
            c.train.stop_after is None
            or 1 <= c.train.stop_after <= (c.train.steps if knows_steps(c) else c.train.stop_after)
        ),
        "it must lie between 1 and train.steps={c.train.steps}",
        "write train.stop_after={c.train.steps} or less, or leave train.stop_after out to run to "
        "the end",
    ),
    Rule(
        "batch-divides",
        "train.global_batch",
        _batch_divides,
        "it must be a multiple of train.micro_batch={c.train.micro_batch} x "
        "train.accumulation={c.train.accumulation}",
        "write train.accumulation=auto, or leave train.global_batch out",
    ),
    _prefetch_rule("forward"),
    _prefetch_rule("backward"),
    Rule(
        "one-way-to-find-units",
        "shard.unit_min_params",
        lambda c: c.shard.unit_classes is None or c.shard.unit_min_params is None,
        "shard.unit_classes is given too, and only one of them can define the units",
        "leave shard.unit_min_params out, or leave shard.unit_classes out",
    ),
    Rule(
        "reshard-group",
        "shard.reshard_after_forward",
        lambda c: (
            isinstance(c.shard.reshard_after_forward, bool | str)
            or c.shard.reshard_after_forward >= 2
        ),
        "a number is the size of a group of ranks, which is 2 or more",
        "write shard.reshard_after_forward=true, or shard.reshard_after_forward=false, or the "
        "number of ranks of a group",
    ),
    Rule(
        "grad-op-keeps-parameters",
        "shard.reshard_after_forward",
        lambda c: c.shard.strategy != "shard_grad_op" or c.shard.reshard_after_forward is not True,
        "shard.strategy=shard_grad_op keeps parameters gathered between forward and backward",
        "write shard.strategy=full_shard, or shard.reshard_after_forward=false",
    ),
    Rule(
        "kept-experts-are-dealt-out",
        "shard.keep_experts",
        lambda c: c.shard.keep_experts is not True or c.mesh.expert not in (1, "auto"),
        "without mesh.expert experts are gathered with the rest of their block",
        "write mesh.expert=2 or more, or leave shard.keep_experts out",
    ),
    Rule(
        "stages-keep-experts-as-the-rest",
        "shard.keep_experts",
        lambda c: c.shard.keep_experts is not True or c.mesh.pipeline in (1, "auto"),
        "a stage of a pipeline keeps all its parameters alike between micro-batches",
        "leave shard.keep_experts out, or write shard.reshard_after_forward=false",
    ),
    Rule(
        "no-shard-has-no-shard-axis",
        "mesh.shard",
        lambda c: c.shard.strategy != "no_shard" or c.mesh.shard in ("auto", 1),
        "shard.strategy=no_shard keeps a whole copy on every rank",
        "write mesh.shard=1, or shard.strategy=hybrid_shard",
    ),
    Rule(
        "float8-is-compiled",
        "precision.linear",
        lambda c: not _is_float8(c) or c.memory.compile is not False,
        "memory.compile is false, and casts that are not compiled into the kernels around them "
        "cost more than float8 gains",
        "leave memory.compile out, or leave precision.linear out",
    ),
    Rule(
        "float8-needs-no-loss-scale",
        "precision.linear",
        lambda c: not _is_float8(c) or c.precision.param != "fp16",
        "precision.param is fp16; GPUs that compute float8 have bf16, which needs no loss scale",
        "write precision.param=bf16, or leave precision.param out",
    ),
    Rule(
        "float8-takes-sixteen-tokens",
        "data.seq_len",
        lambda c: not _is_float8(c) or c.data.seq_len % 16 == 0,
        "float8 matmuls take tokens sixteen at a time",
        _whole_sixteens,
    ),
    Rule(
        "bf16-state-is-ours",
        "optim.state",
        lambda c: c.optim.state != "bf16" or _may_use_own_adamw(c),
        "torch's AdamW keeps its state in the dtype of the parameters; only our own fused kernel, "
        "on the device, keeps it in bf16",
        _without_bars,
    ),
    Rule(
        "int8-state-is-not-fused",
        "optim.fused",
        lambda c: c.optim.fused is not True or c.optim.state != "int8",
        "optim.state=int8 has no fused kernel",
        "leave optim.fused out, or leave optim.state out",
    ),
    Rule(
        "weights-from-is-read",
        "model.weights_from",
        lambda c: c.model.weights_from is None or c.model.weights != "random",
        "model.weights=random reads nothing from it",
        "leave model.weights_from out, or write model.weights=pretrained",
    ),
    Rule(
        "ignored-weights-are-patterns",
        "model.ignore_weights",
        lambda c: all(map(_is_pattern, c.model.ignore_weights)),
        "each of them must be a regular expression",
        "write model.ignore_weights=[^mtp], or leave it out",
    ),
    Rule(
        "remote-code-is-pinned",
        "model.trust_remote_code",
        _code_is_pinned,
        "without model.revision the code of {c.model.name} is not pinned and can change any time",
        "write model.revision=COMMIT_HASH, or model.name=DIR of a local copy",
    ),
    *DATA_RULES,
    *MIXTURE_RULES,
    *HELD_OUT_RULES,
    *ADAPTER_RULES,
    *DILOCO_RULES,
    *EPOCH_RULES,
    *EVAL_RULES,
    *OPTIMIZER_RULES,
    *PAGING_RULES,
    *PREFERENCE_RULES,
    *LAUNCH_RULES,
    *KUBERNETES_RULES,
    *SKYPILOT_RULES,
    *OBSERVE_RULES,
)
