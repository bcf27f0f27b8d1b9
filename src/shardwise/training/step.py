"""One optimizer step: accumulate, normalise by the global token count, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.data.loader import MicroBatch
from shardwise.parallel.float8 import refresh_scales
from shardwise.parallel.shard import reshard_all
from shardwise.plan.plan import Plan
from shardwise.training.balance import Balance, Routing, mean_routing
from shardwise.training.documents import kept_apart
from shardwise.training.optim import set_learning_rate, step_if_finite


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured; losses are still on the device."""

    loss_sum: Tensor
    num_tokens: Tensor
    grad_norm: float
    applied: bool
    """Whether the update was made: not where the gradient was not finite."""

    stop_requested: bool
    """Whether some rank was asked to stop; the same on all of them."""

    routing: Routing | None = None
    """How evenly tokens went to experts, where a load-balancing loss is trained with."""


class Reading:
    """A number of the device that the host reads later, without a wait for what is queued since."""

    def __init__(self, value: Tensor) -> None:
        # To page-locked memory, since it does not block.
        self._copy = value.to("cpu", non_blocking=True)
        self._arrived = None
        if value.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def value(self) -> float:
        """Waits until the device has come to where it was taken."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.item()


class Stepper:
    """Runs optimizer steps of one sharded model."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.AdamW,
        plan: Plan,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.on_phase = on_phase
        self.device = torch.device(plan.cluster.device)
        self.clip_norm = plan.config.optim.clip_norm
        self.is_fused = plan.fused_optimizer.value
        self.aux_coefficient = plan.router_aux_loss.value
        self.balance = Balance(model) if self.aux_coefficient else None
        self.reduces_every_pass = plan.accumulate.value == "sharded"
        # fp16 gradients underflow without a scale; other formats have the range.
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=plan.config.precision.loss_scale,
            enabled=plan.param_dtype.value == "fp16",
        )

    def run(
        self, batches: Sequence[MicroBatch], rate: float, *, wants_stop: bool = False
    ) -> StepResult:
        """Forward and backward over all micro-batches, then one update at `rate`."""
        self.on_phase("agree")
        num_tokens, stops = self._agree(batches, wants_stop)
        loss_sum = torch.zeros((), device=self.device)
        routing: list[Routing] = []
        for index, batch in enumerate(batches):
            self._set_sync(last=index == len(batches) - 1)
            self.on_phase("forward")
            loss, logits = self._forward(batch)
            loss_sum += loss.detach()
            objective = loss / num_tokens
            if self.balance is not None:
                self.on_phase("agree")
                part, routed = self.balance.over_ranks(logits)
                routing.append(routed)
                # Micro-batches are equally large, so that each has the same share.
                objective = objective + self.aux_coefficient / len(batches) * part
            self.on_phase("backward")
            self.scaler.scale(objective).backward()
        grad_norm, applied = self.update(rate)
        self.on_phase("agree")
        dist.all_reduce(loss_sum)
        return StepResult(
            loss_sum,
            num_tokens,
            grad_norm,
            applied,
            bool(stops.value()),
            mean_routing(routing) if routing else None,
        )

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, list[Tensor]]:
        """The summed cross-entropy, and the logits of routers where they are balanced."""
        if self.balance is None:
            return _sum_loss(self.model, batch, self.device), []
        with self.balance.watching() as logits:
            loss = _sum_loss(self.model, batch, self.device)
        return loss, logits

    def update(self, rate: float) -> tuple[float, bool]:
        """Clip and update. The norm is of all ranks, so all decide alike whether it is finite."""
        set_learning_rate(self.optimizer, rate)
        if self.scaler.is_enabled() or not self.is_fused:
            return self._update_when_read()
        return self._update_ahead()

    def _update_ahead(self) -> tuple[float, bool]:
        """The update is on its way before its norm is read: meanwhile the device has work."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm(grads))
        reading = Reading(norm)
        step_if_finite(self.optimizer, norm, self.clip_norm)
        refresh_scales(self.model, self.plan)
        self.optimizer.zero_grad(set_to_none=True)
        value = reading.value()
        return value, math.isfinite(value)

    def _update_when_read(self) -> tuple[float, bool]:
        """For other optimizers, and for fp16, whose scaler judges the gradients itself."""
        self.scaler.unscale_(self.optimizer)
        limit = float("inf") if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        value = float(_whole(norm))
        # An fp16 overflow is ordinary: the scaler skips the update and lowers its scale.
        applied = self.scaler.is_enabled() or math.isfinite(value)
        if applied:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            refresh_scales(self.model, self.plan)
        self.optimizer.zero_grad(set_to_none=True)
        return value, applied

    def scale_state(self) -> dict[str, float] | None:
        """fp16's loss scale and how long it has held; None for other formats."""
        state = self.scaler.state_dict()
        return {"scale": state["scale"], "held": state["_growth_tracker"]} if state else None

    def restore_scale(self, saved: dict[str, float] | None) -> None:
        """Go on with a saved loss scale."""
        if saved is not None and self.scaler.is_enabled():
            state = {**self.scaler.state_dict(), "scale": saved["scale"]}
            self.scaler.load_state_dict({**state, "_growth_tracker": int(saved["held"])})

    def _agree(self, batches: Sequence[MicroBatch], wants_stop: bool) -> tuple[Tensor, Reading]:
        """Over all ranks: valid tokens of the step, so that uneven ranks change nothing, and how
        many ranks want to stop after it."""
        tokens = sum(batch.num_valid_tokens for batch in batches)
        # From page-locked memory, since a copy from other memory waits for all that is queued.
        counts = torch.tensor([tokens, int(wants_stop)], pin_memory=self.device.type == "cuda").to(
            self.device, non_blocking=True
        )
        dist.all_reduce(counts)
        return counts[0].clamp(min=1), Reading(counts[1])

    def _set_sync(self, *, last: bool) -> None:
        """Gradients are reduced on the last pass; replicas never exchange them before it."""
        self.model.set_requires_gradient_sync(last or self.reduces_every_pass)
        self.model.set_requires_all_reduce(last)


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[MicroBatch], device: torch.device) -> float:
    """Mean loss over the held-out batches of all ranks."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        totals[0] += _sum_loss(model, batch, device)
        totals[1] += batch.num_valid_tokens
    model.train()
    reshard_all(model)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _sum_loss(model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
    inputs, labels = (side.to(device, non_blocking=True) for side in (batch.inputs, batch.labels))
    apart = {} if batch.documents is None else kept_apart(batch.documents, device)
    loss: Tensor = model.sum_loss(inputs, labels, **apart)
    return loss
