"""What can take the place of a part of the loop: the passes of a step, and an outer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.events import EventLog
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.training import loop as loop_module
from shardwise.training.channels import Channels
from shardwise.training.heartbeat import Heartbeat
from shardwise.training.loop import Loop
from shardwise.training.outer import Standing
from shardwise.training.passes import Passed
from shardwise.training.session import Session, attach_training_loss, build_loader, build_session
from shardwise.training.signals import StopRequest
from shardwise.training.step import Stepper

MakePlan = Callable[..., Plan]


class LastFirst:
    """Another order of the micro-batches, as a schedule of a pipeline would have one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.seen: list[MicroBatch] = []

    def forward_backward(
        self, batches: Sequence[MicroBatch], num_tokens: Tensor, loss_scale: float
    ) -> Passed:
        total = torch.zeros(())
        for batch in reversed(batches):
            self.seen.append(batch)
            loss = self.model.sum_loss(batch.inputs, batch.labels)
            (loss * loss_scale / num_tokens).backward()
            total += loss.detach()
        return Passed(total)


def session_of(plan: Plan) -> Session:
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach_training_loss(session, lambda text: None)
    return session


def test_other_passes_can_make_a_step(lone_plan: MakePlan) -> None:
    plan = lone_plan("train.global_batch=6", "precision.param=fp32")
    losses = []
    for own in (False, True):
        session = session_of(plan)
        passes = LastFirst(session.model) if own else None
        parts = (session.model, session.optimizer, plan, session.mesh)
        stepper = Stepper(*parts, passes=passes)
        batches = build_loader(session).step_batches(0)
        assert len(batches) == 3
        result = stepper.run(batches, 1e-3)
        assert result.applied
        losses.append((result.loss_sum.item(), result.grad_norm))
        if passes is not None:
            assert passes.seen == batches[::-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_an_outer_step_follows_each_update(
    lone_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lone_plan("train.steps=5", "checkpoint.at_end=false", "train.check_loss=false")
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach = loop_module.attach_training_loss
    calls = 0

    def attach_with_a_bad_batch(session: Session, say: Callable[[str], None]) -> None:
        attach(session, say)
        sum_loss = session.model.sum_loss

        def spoiled(*args: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return sum_loss(*args) * (float("nan") if calls == 3 else 1.0)

        session.model.sum_loss = spoiled

    monkeypatch.setattr(loop_module, "attach_training_loss", attach_with_a_bad_batch)
    outer: list[Standing] = []
    with EventLog(plan.run_dir / "events.jsonl", enabled=False) as events:
        channels = Channels(events, lambda text: None, StopRequest(), Heartbeat(0))
        timer = CollectiveTimer(session.device, session.mesh.world)
        run = Loop(session, channels, timer, outer.append)
        try:
            run.run(None)
        finally:
            run.saving.close()
    # The third batch gave no update, and so no outer step.
    assert calls == 6 and [each.step for each in outer] == [1, 2, 3, 4, 5]
