"""One optimizer step: accumulate, normalise by the global token count, clip, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.data.loader import MicroBatch
from shardwise.parallel.shard import reshard_all
from shardwise.plan.plan import Plan
from shardwise.train.optim import set_learning_rate


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured, still on the device: reading it waits for the step to end."""

    loss_sum: Tensor
    num_tokens: Tensor
    grad_norm: Tensor


class Stepper:
    """Runs optimizer steps of one sharded model."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(plan.cluster.device)
        self.clip_norm = plan.config.optim.clip_norm
        self.reduces_every_pass = plan.accumulate.value == "sharded"
        # fp16 gradients underflow without a scale; other formats have the range.
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=plan.config.precision.loss_scale,
            enabled=plan.param_dtype.value == "fp16",
        )

    def run(self, batches: Sequence[MicroBatch], rate: float) -> StepResult:
        """Forward and backward over all micro-batches, then one update at `rate`."""
        num_tokens = self._global_tokens(batches)
        loss_sum = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            self._set_sync(last=index == len(batches) - 1)
            loss = self.model.sum_loss(*_on(self.device, batch))
            loss_sum += loss.detach()
            self.scaler.scale(loss / num_tokens).backward()
        grad_norm = self._update(rate)
        dist.all_reduce(loss_sum)
        return StepResult(loss_sum, num_tokens, grad_norm)

    def _global_tokens(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Valid tokens of the step over all ranks, so that uneven ranks change nothing."""
        count = torch.tensor(sum(batch.num_valid_tokens for batch in batches), device=self.device)
        dist.all_reduce(count)
        return count

    def _set_sync(self, *, last: bool) -> None:
        """Gradients are reduced on the last pass; replicas never exchange them before it."""
        self.model.set_requires_gradient_sync(last or self.reduces_every_pass)
        self.model.set_requires_all_reduce(last)

    def _update(self, rate: float) -> Tensor:
        set_learning_rate(self.optimizer, rate)
        self.scaler.unscale_(self.optimizer)
        limit = float("inf") if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[MicroBatch], device: torch.device) -> float:
    """Mean loss over the held-out batches of all ranks."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        totals[0] += model.sum_loss(*_on(device, batch))
        totals[1] += batch.num_valid_tokens
    model.train()
    reshard_all(model)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def _on(device: torch.device, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return (
        batch.inputs.to(device, non_blocking=True),
        batch.labels.to(device, non_blocking=True),
    )
