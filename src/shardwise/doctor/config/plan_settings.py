"""Number formats, memory and the optimizer of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import trained_share
from shardwise.units import format_bytes

# Below this share of the memory a run could keep more activations.
_ROOMY = 0.6
_MUCH_RECOMPUTE = 0.10
_LONGEST_LOSS = 2**30
_LONGEST_UNSAVED_S = 12 * 3600


def _narrow_sums(plan: Plan) -> Iterator[str]:
    decided = plan.decided
    if decided.reduce_dtype != "fp32" and plan.world_size > 1:
        yield f"gradients of {plan.world_size} ranks are added up in {decided.reduce_dtype}"


def _fp16_for_bf16(plan: Plan) -> Iterator[str]:
    if plan.decided.param_dtype == "fp16" and "bf16" in plan.cluster.compute_formats:
        yield f"precision.param=fp16, and {plan.cluster.device_in_words} computes bf16"


def _unsupported_bf16(plan: Plan) -> Iterator[str]:
    if plan.decided.param_dtype == "bf16" and "bf16" not in plan.cluster.compute_formats:
        yield f"precision.param=bf16, and {plan.cluster.device_in_words} has no bf16 arithmetic"


def _slow_optimizer(plan: Plan) -> Iterator[str]:
    if plan.decided.offload and not plan.decided.fused_optimizer:
        yield "memory.offload=cpu with optim.fused=false"


def _pageable(plan: Plan) -> Iterator[str]:
    if plan.decided.offload and not plan.config.memory.pin_memory:
        yield "memory.offload=cpu with memory.pin_memory=false"


def _needless_offload(plan: Plan) -> Iterator[str]:
    held = plan.memory.total + 16 * trained_share(plan.model, plan.decided)
    if plan.decided.offload and held < _ROOMY * plan.cluster.memory_bytes:
        yield (
            f"about {format_bytes(held)} would be held without it, of "
            f"{format_bytes(plan.cluster.memory_bytes)}"
        )


def _needless_recompute(plan: Plan) -> Iterator[str]:
    forecast, choice = plan.forecast, plan.choices["checkpoint_activations"]
    if forecast is None or choice.source != "user" or plan.decided.offload:
        return
    share = forecast.terms["recompute"] / forecast.step_s
    if share > _MUCH_RECOMPUTE and plan.memory.high < _ROOMY * plan.cluster.memory_bytes:
        yield (
            f"memory.checkpoint_activations={choice.value} takes {share:.0%} of a step, and "
            f"{format_bytes(plan.memory.high)} of {format_bytes(plan.cluster.memory_bytes)} are "
            "likely to be held"
        )


def _all_logits(plan: Plan) -> Iterator[str]:
    if plan.decided.loss == "full" and plan.memory.loss > max(
        _LONGEST_LOSS, plan.cluster.memory_bytes // 4
    ):
        yield f"memory.loss=full holds {format_bytes(plan.memory.loss)} of logits and gradients"


def _no_clipping(plan: Plan) -> Iterator[str]:
    if plan.config.optim.clip_norm is None and plan.model.trained_params > 10**9:
        yield "optim.clip_norm is unset"


def _unsaved(plan: Plan) -> Iterator[str]:
    every, steps = plan.config.checkpoint.every, plan.config.train.steps
    step_s = plan.forecast.step_s if plan.forecast is not None else 0.0
    lost_s = min(every or steps, steps) * step_s
    if lost_s > _LONGEST_UNSAVED_S:
        yield (
            f"checkpoint.every={every}: a failure may lose {lost_s / 3600:.0f} hours of "
            f"{plan.world_size} devices"
        )


def _said_by_the_plan(plan: Plan) -> Iterator[str]:
    yield from plan.warnings


SETTINGS: tuple[Check[Plan], ...] = (
    Check(
        "SW120", "warning", "Gradients are reduced in a narrow format",
        "Sums over many ranks lose bits in bf16 and fp16. Long runs can diverge.",
        "write precision.reduce=fp32, or leave precision.reduce out",
        _narrow_sums,
    ),
    Check(
        "SW121", "warning", "fp16 on a device that computes bf16",
        "fp16 needs loss scaling. A scale that collapses gives NaN or stops learning.",
        "write precision.param=bf16, or leave precision.param out",
        _fp16_for_bf16,
    ),
    Check(
        "SW122", "warning", "bf16 on a device that does not compute it",
        "Devices before Ampere emulate bf16, many times slower.",
        "write precision.param=fp16, or leave precision.param out",
        _unsupported_bf16,
    ),
    Check(
        "SW123", "warning", "Offload without the fused optimizer",
        "AdamW on the CPU then runs tensor by tensor, and a step can take many seconds.",
        "write optim.fused=auto",
        _slow_optimizer,
    ),
    Check(
        "SW124", "warning", "Offload without pinned memory",
        "Copies from pageable memory do not overlap with compute.",
        "write memory.pin_memory=true",
        _pageable,
    ),
    Check(
        "SW125", "note", "Offload is not needed",
        "Offload costs a half to two thirds of the speed, and this model would fit without it.",
        "write memory.offload=none, and compare both with `shardwise plan`",
        _needless_offload,
    ),
    Check(
        "SW126", "note", "Activations are recomputed though there is room",
        "Recomputing costs up to a third of the compute of a step.",
        "write memory.checkpoint_activations=auto",
        _needless_recompute,
    ),
    Check(
        "SW127", "warning", "All logits are held at once",
        "Logits of a large vocabulary and their gradients can be the peak of a step.",
        "write memory.loss=auto",
        _all_logits,
    ),
    Check(
        "SW128", "note", "Gradients are not clipped",
        "One bad batch can then ruin a large model.",
        "write optim.clip_norm=1.0",
        _no_clipping,
    ),
    Check(
        "SW129", "warning", "Checkpoints are hours apart",
        "On large clusters a failure every few hours is usual, and its steps are done again.",
        "write a smaller checkpoint.every; saves are written in the background",
        _unsaved,
    ),
    Check(
        "SW130", "warning", "The plan has a warning",
        "The planner could not make this safe.",
        "see `shardwise plan FILE`, which explains each choice",
        _said_by_the_plan,
    ),
)  # fmt: skip
