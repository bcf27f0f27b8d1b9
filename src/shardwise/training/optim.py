"""AdamW over the shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.schema import OptimConfig
from shardwise.plan.plan import Plan


def build_optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """Matrices decay, vectors (norms, biases) do not."""
    optim = plan.config.optim
    params = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=plan.fused_optimizer.value,
    )


def step_if_finite(optimizer: torch.optim.AdamW, norm: Tensor, clip_norm: float | None) -> None:
    """One update by gradients of this norm, clipped. Where it is not finite the device leaves the
    update out, so that nobody has to read it first.

    A fused optimizer takes both on its way through the gradients, in the form in which GradScaler
    hands them over; clipping beforehand would read and write all of them once more.
    """
    fused: Any = optimizer
    fused.found_inf = (~norm.isfinite()).float()
    if clip_norm is not None:
        # clip_grad_norm_ multiplies by the inverse of this.
        fused.grad_scale = ((norm + 1e-6) / clip_norm).clamp(min=1.0)
    optimizer.step()


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of step `step`, counted from 0, in a run of `num_steps`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    return optim.lr * _decay(optim, step, num_steps)


def _decay(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Share of the peak rate after warm-up: 1 at its end, `min_lr_ratio` at the last step."""
    if optim.schedule == "constant":
        return 1.0
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        length = num_steps // 10 if optim.decay_steps == "auto" else optim.decay_steps
        start = max(start, num_steps - 1 - length)
    progress = min(1.0, max(0.0, (step - start) / max(1, num_steps - 1 - start)))
    if optim.schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - optim.min_lr_ratio) * progress


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
