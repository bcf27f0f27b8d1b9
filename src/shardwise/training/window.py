"""The steps since the last logged one: their losses, tokens and time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.metrics.meters import efficiency, peak_memory
from shardwise.metrics.progress_line import StepReport
from shardwise.parallel.mesh import Mesh
from shardwise.plan.planned import Plan
from shardwise.training.balance import mean_routing
from shardwise.training.expert_load import load_of, summed
from shardwise.training.preference_losses import scores_of
from shardwise.training.step import StepResult


@dataclass(slots=True)
class Window:
    """Collects step results on the device. Only `report` reads them and so waits."""

    plan: Plan
    device: torch.device
    mesh: Mesh
    data_wait_s: float = 0.0
    results: list[StepResult] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of these steps on all ranks, padding included."""

    started: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult, num_tokens: int) -> None:
        """Add one step of so many tokens."""
        self.results.append(result)
        self.num_tokens += num_tokens

    def report(self, step: int, tokens: int, lr: float, data_wait_s: float) -> StepReport:
        """The figures of these steps. `data_wait_s` is the loop's total so far."""
        loss_sum = sum(result.loss_sum.double() for result in self.results)
        num_tokens = sum(result.num_tokens for result in self.results)
        loss = float(loss_sum / sum(result.num_terms for result in self.results))
        trained = int(num_tokens) if self.plan.settings.data.format != "text" else None
        routing = [result.routing for result in self.results if result.routing is not None]
        routed = mean_routing(routing) if routing else None
        grad_norm = self.results[-1].grad_norm
        elapsed = time.perf_counter() - self.started
        step_s = elapsed / len(self.results)
        plan, train = self.plan, self.plan.settings.train
        tokens_per_s = self.num_tokens / elapsed / self.mesh.world.size
        counts = summed([result.experts for result in self.results if result.experts is not None])
        return StepReport(
            step=step,
            num_steps=train.steps,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_s=step_s,
            tokens=tokens,
            tokens_per_s=tokens_per_s,
            tokens_per_s_planned=plan.forecast.tokens_per_s if plan.forecast else None,
            # The FLOPs of attention are those of full sequences.
            efficiency=None if plan.settings.data.group_lengths else efficiency(plan, tokens_per_s),
            mfu_planned=plan.forecast.mfu if plan.forecast else None,
            memory=peak_memory(self.device),
            memory_capacity=plan.cluster.memory_bytes,
            memory_planned=plan.peak_bytes,
            data_share=(data_wait_s - self.data_wait_s) / elapsed,
            eta_s=(train.steps - step) * step_s,
            aux_loss=_read(routed.aux_loss) if routed else None,
            z_loss=_read(routed.z_loss) if routed else None,
            experts=None if counts is None else load_of(counts, self.mesh.router_group),
            trained_tokens=trained,
            preference=scores_of(
                [result.scores for result in self.results if result.scores is not None],
                self.mesh.token_group,
            ),
            trained_share=trained and trained / self.num_tokens,
        )


def _read(value: Tensor | None) -> float | None:
    return None if value is None else value.item()
