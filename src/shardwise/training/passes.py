"""Forward and backward over all micro-batches of a step: the gradients, and this rank's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.plan.planned import Plan
from shardwise.training.balance import Balance, Routing, mean_routing
from shardwise.training.expert_load import ExpertCounter, TokenCounts, summed
from shardwise.training.objective import BatchLoss, Objective


@dataclass(frozen=True, slots=True)
class Passed:
    """The results of all passes of a step besides gradients, still on the device."""

    loss_sum: Tensor
    """Over the tokens of this rank."""

    routing: Routing | None = None
    """The losses of routers, over all ranks that hold tokens."""

    experts: TokenCounts | None = None
    """The tokens of each expert on this rank; None for a dense model."""

    scores: Tensor | None = None
    """Sums over the answers of this rank that were compared; None where none were."""


class Passes(Protocol):
    """Runs all micro-batches of a step.

    The schedule of a pipeline can take its place: nothing else knows the order in which
    micro-batches go forward and backward.
    """

    def forward_backward(
        self, batches: Sequence[MicroBatch], num_terms: Tensor, loss_scale: float
    ) -> Passed:
        """Add the gradients of (loss sum / `num_terms` x `loss_scale`) to the parameters'."""
        ...


class OneByOne:
    """Forward and backward of one micro-batch after the other."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        balance: Balance | None,
        on_phase: Callable[[str], None],
        objective: Objective,
    ) -> None:
        self.model = model
        self.objective = objective
        self.device = torch.device(plan.cluster.device)
        self.balance = balance
        self.aux_coefficient = plan.decided.router_aux_loss
        self.z_coefficient = plan.decided.router_z_loss
        self.reduces_every_pass = plan.decided.accumulate == "sharded"
        self.holds_gathered = plan.decided.holds_gathered
        # Where tokens travel to experts, these ranks have divided them before.
        self.tensor = plan.decided.tensor if plan.decided.expert == 1 else 1
        self.on_phase = on_phase
        self.counter = ExpertCounter(model, self.device)

    def forward_backward(
        self, batches: Sequence[MicroBatch], num_terms: Tensor, loss_scale: float
    ) -> Passed:
        """The gradients are reduced in the last backward, or in each as the plan says."""
        loss_sum = torch.zeros((), device=self.device)
        routing: list[Routing] = []
        counts: list[TokenCounts] = []
        scores: list[Tensor] = []
        for index, batch in enumerate(batches):
            self._set_sync(last=index == len(batches) - 1)
            self.on_phase("forward")
            with self.counter.counting() as counted:
                loss, logits = self._forward(batch)
            counts += counted
            scores += [] if loss.scores is None else [loss.scores]
            loss_sum += loss.total.detach()
            objective = loss.total / num_terms
            if self.balance is not None:
                self.on_phase("agree")
                part, routed = self.balance.over_ranks(logits)
                routing.append(routed)
                # Micro-batches are equally large, so each has the same share. Ranks along `tensor`
                # have the same tokens, and their gradients are added up.
                num_sums = len(batches) * self.tensor
                if part.aux_loss is not None:
                    objective = objective + self.aux_coefficient / num_sums * part.aux_loss
                if part.z_loss is not None:
                    objective = objective + self.z_coefficient / num_sums * part.z_loss
            self.on_phase("backward")
            if loss_scale != 1.0:
                objective = objective * loss_scale
            objective.backward()
        return Passed(
            loss_sum,
            mean_routing(routing) if routing else None,
            summed(counts),
            torch.stack(scores).sum(0) if scores else None,
        )

    def _forward(self, batch: MicroBatch) -> tuple[BatchLoss, list[Tensor]]:
        """The summed loss, and the routers' logits where they have a loss."""
        if self.balance is None:
            return self.objective.loss(self.model, batch, self.device), []
        with self.balance.watching() as logits:
            loss = self.objective.loss(self.model, batch, self.device)
        return loss, logits

    def _set_sync(self, *, last: bool) -> None:
        """Gradients are reduced in the last pass. Replicas never exchange them before it."""
        self.model.set_requires_gradient_sync(last or self.reduces_every_pass)
        self.model.set_requires_all_reduce(last)
        if self.holds_gathered:
            # The next pass needs them again, and each time they would cross PCIe.
            self.model.set_reshard_after_backward(last)
