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
from shardwise.model.cuts import cuts_by_param
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.stages import stages_of
from shardwise.parallel.torchao_float8 import refresh_scales
from shardwise.plan.planned import Plan
from shardwise.training.balance import Balance, Routing
from shardwise.training.copied_gradients import GradientSums
from shardwise.training.expert_load import TokenCounts
from shardwise.training.grad_norm import clip_by_norm, total_norm
from shardwise.training.leftovers import give_back
from shardwise.training.objective import NextToken, Objective
from shardwise.training.optim import allocate_state, set_learning_rate, step_if_finite
from shardwise.training.overlapped import settle
from shardwise.training.passes import OneByOne, Passed, Passes
from shardwise.training.pipeline import StagePasses
from shardwise.training.scale import scale_of
from shardwise.training.tied import TiedTable


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step. Losses are still on the device."""

    loss_sum: Tensor
    num_tokens: Tensor
    """Those that the loss was computed on."""

    num_terms: Tensor
    """What the loss is a mean over: these tokens, or pairs or answers that are compared."""

    grad_norm: float
    applied: bool
    """Whether the update was made: not where the loss or the gradient was not finite."""

    stop_requested: bool
    """Whether some rank was asked to stop; the same on all of them."""

    routing: Routing | None = None
    """The losses of routers, where they are trained with."""

    experts: TokenCounts | None = None
    """The tokens of each expert on this rank; None for a dense model."""

    scores: Tensor | None = None
    """Sums over the answers of this rank that were compared; None where none were."""

    overflows: int = 0
    """How often fp16's loss scale had to fall before the gradient was finite."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The numbers that decided whether an update was made."""

    grad_norm: float
    loss: float

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is finite. If it is and the gradient is not, fp16's loss scale may be
        the cause."""
        return math.isfinite(self.loss)

    @property
    def is_finite(self) -> bool:
        """Whether the update was made."""
        return self.loss_is_finite and math.isfinite(self.grad_norm)


class Reading:
    """A number on the device that the host reads later, without waiting for what was queued
    since."""

    def __init__(self, value: Tensor) -> None:
        # The copy goes to page-locked memory, so it does not block.
        self._copy = value.to("cpu", non_blocking=True)
        self._arrived = None
        if value.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def value(self) -> float:
        """The number. It waits until the device has reached the point at which it was taken."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.item()


class Stepper:
    """Runs optimizer steps of one sharded model."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        mesh: Mesh,
        on_phase: Callable[[str], None] = lambda phase: None,
        passes: Passes | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.mesh = mesh
        self.on_phase = on_phase
        self.device = torch.device(plan.cluster.device)
        self.clip_norm = plan.settings.optim.clip_norm
        self.is_fused = plan.decided.fused_optimizer
        self.scale = scale_of(plan)
        aux, z = bool(plan.decided.router_aux_loss), bool(plan.decided.router_z_loss)
        balance = Balance(model, mesh.router_group, aux=aux, z=z) if aux or z else None
        self.objective = objective or NextToken(mesh.split)
        stages = stages_of(plan, mesh)
        if passes is None and stages is not None:
            passes = StagePasses(model, plan, stages, on_phase)
        self.passes = passes or OneByOne(model, plan, balance, on_phase, self.objective)
        cuts = cuts_by_param(model)
        groups = {param: mesh.group(cut.axis) for param, cut in cuts.items()}
        self.cut_over = {param: group for param, group in groups.items() if group is not None}
        self.sums = GradientSums(model, mesh, self.device)
        self.tied = TiedTable(model, stages, is_tied=plan.model.tied_embeddings)
        self.num_run = 0

    def run(
        self, batches: Sequence[MicroBatch], rate: float, *, wants_stop: bool = False
    ) -> StepResult:
        """Forward and backward over all micro-batches, then one update at `rate`.

        Gradients that overflow because of fp16's loss scale are computed again with a smaller one,
        so no batch is lost to it. If they are still not finite, the scale is not the cause.
        """
        self._arrange_memory()
        self.on_phase("agree")
        num_tokens, num_terms, stops = self._agree(batches, wants_stop)
        self.objective.prepare(self.model, batches, self.device)
        before, overflows = self.scale.to_dict(), 0
        while True:
            passed = self._accumulate(batches, num_terms)
            judged = self.update(rate, passed.loss_sum)
            if judged.is_finite or not (judged.loss_is_finite and self.scale.can_fall):
                break
            self.scale.fall()
            overflows += 1
        if judged.is_finite:
            self.scale.hold()
        else:
            self.scale.restore(before)
        return StepResult(
            passed.loss_sum,
            num_tokens,
            num_terms,
            judged.grad_norm,
            judged.is_finite,
            bool(stops.value()),
            passed.routing,
            passed.experts,
            passed.scores,
            overflows if judged.is_finite else 0,
        )

    def settle(self) -> None:
        """Wait until the last update is made, so that others may read parameters and state."""
        settle(self.optimizer)

    def _arrange_memory(self) -> None:
        """Leave as few holes as possible: what stays comes first, and what the first step left
        behind goes."""
        if self.num_run == 0:
            allocate_state(self.optimizer)
        elif self.num_run == 1:
            give_back(self.device)
        self.num_run += 1

    def _accumulate(self, batches: Sequence[MicroBatch], num_terms: Tensor) -> Passed:
        """Gradients of all micro-batches; the loss is summed over all ranks."""
        passed = self.passes.forward_backward(batches, num_terms, self.scale.value)
        self.on_phase("agree")
        self.sums.reduce()
        self.tied.reduce()
        dist.all_reduce(passed.loss_sum, group=self.mesh.loss_group)
        self.on_phase("update")
        return passed

    def update(self, rate: float, loss_sum: Tensor) -> Judged:
        """Clip and update, unless loss or gradient is not finite.

        Both are of all ranks, so all ranks decide alike.
        """
        set_learning_rate(self.optimizer, rate)
        judged = self._update_ahead(loss_sum) if self.is_fused else self._update_when_read(loss_sum)
        self.optimizer.zero_grad(set_to_none=True)
        return judged

    def _update_ahead(self, loss_sum: Tensor) -> Judged:
        """Launch the update before its norm is read, so that the device has work meanwhile."""
        norm = self._norm() / self.scale.value
        readings = Reading(norm), Reading(loss_sum)
        # This is NaN where either is not finite.
        both = norm + 0.0 * loss_sum.to(norm.device)
        step_if_finite(self.optimizer, both, self.clip_norm, self.scale.value)
        refresh_scales(self.model, self.plan)
        return Judged(*(reading.value() for reading in readings))

    def _update_when_read(self, loss_sum: Tensor) -> Judged:
        """Read the norm first, for other optimizers."""
        norm = self._norm() / self.scale.value
        judged = Judged(norm.item(), loss_sum.item())
        if judged.is_finite:
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            if self.scale.value != 1.0:
                for grad in grads:
                    grad.div_(self.scale.value)
            if self.clip_norm is not None:
                clip_by_norm(grads, self.clip_norm, norm)
            self.optimizer.step()
            refresh_scales(self.model, self.plan)
        return judged

    def _norm(self) -> Tensor:
        """The norm of the gradients of all ranks, with the same bits on each of them."""
        params = filter(self.tied.counts, self.model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        cut_over = {
            param.grad: group for param, group in self.cut_over.items() if param.grad is not None
        }
        norm = total_norm(grads, cut_over)
        if (stages := self.mesh.group("pipeline")) is not None:
            square = norm.square()
            dist.all_reduce(square, group=stages)
            norm = square.sqrt()
        if self.mesh.clip_group is not None and any(isinstance(grad, DTensor) for grad in grads):
            # Every replica has summed in an order of its own. Clipped by norms that differ in their
            # last bit, replicas would drift apart.
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.mesh.clip_group)
        return norm

    def _agree(
        self, batches: Sequence[MicroBatch], wants_stop: bool
    ) -> tuple[Tensor, Tensor, Reading]:
        """Over all ranks: the valid tokens and the terms of the step, so that uneven ranks change
        nothing, and how many ranks want to stop after it."""
        tokens = sum(batch.num_valid_tokens for batch in batches) * self.mesh.counts_batch
        terms = sum(map(self.objective.num_terms, batches)) * self.mesh.counts_batch
        # The copy comes from page-locked memory, because one from other memory waits for all that
        # is queued.
        counts = torch.tensor(
            [tokens, terms, int(wants_stop)], pin_memory=self.device.type == "cuda"
        ).to(self.device, non_blocking=True)
        dist.all_reduce(counts, group=self.mesh.step_group)
        return counts[0].clamp(min=1), counts[1].clamp(min=1), Reading(counts[2])
