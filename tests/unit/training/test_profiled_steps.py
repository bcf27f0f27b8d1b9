"""The profiler around steps of a small model: what it writes, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.metrics.events import EventLog, read_events
from shardwise.metrics.overlap import Profile, profile_of
from shardwise.metrics.trace_file import read_trace
from shardwise.model.blocks import Unit, UnitMap
from shardwise.parallel.mesh import World
from shardwise.plan.planned import Plan
from shardwise.training.profiled_steps import StepProfiler

MakePlan = Callable[..., Plan]
UNITS = UnitMap((Unit("first", ("0",), 1, True), Unit("second", ("2",), 1, True)), 0, "hand")


class Trainer:
    """Steps of a model, profiled as the loop has it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.profiler = StepProfiler(plan, self.model, UNITS, World.joined())
        self.said: list[str] = []

    def train(self, first: int, last: int) -> None:
        with EventLog(self.plan.run_dir / "events.jsonl", enabled=True) as events:
            for step in range(first, last + 1):
                with self.profiler.step(step):
                    self.model(torch.ones(4, 32)).sum().backward()
                self.profiler.finish(step, events, self.said.append)

    def hooks(self) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model)

    def trace(self) -> Path:
        return self.plan.run_dir / "profile" / "step-3-rank-0.json.gz"

    def found(self) -> Profile:
        return profile_of(read_trace(self.trace()))


def test_the_steps_that_were_asked_for_are_told_by_unit(lone_plan: MakePlan) -> None:
    trainer = Trainer(lone_plan("observe.profile=3", "observe.profile_steps=2"))
    trainer.train(1, 6)
    found = trainer.found()
    assert [step.step for step in found.steps] == [3, 4]
    assert not found.collectives
    # A linear layer is `addmm` in forward and `mm` in backward, here once for each of its inputs.
    for name in ("aten::linear", "aten::mm"):
        assert {row.unit for row in found.kernels if row.name == name} == {"first", "second"}
    assert trainer.hooks() == 0
    (event,) = read_events(trainer.plan.run_dir / "events.jsonl")
    assert (event["event"], event["step"], event["exposed_share"]) == ("profile", 4, 0.0)
    assert trainer.said[0].startswith("profiled 2 steps: ")


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_run_that_resumes_at_the_first_step_profiles_it(lone_plan: MakePlan) -> None:
    trainer = Trainer(lone_plan("observe.profile=3", "observe.profile_steps=2"))
    trainer.train(3, 4)
    assert [step.step for step in trainer.found().steps] == [3, 4]


def test_a_run_beyond_these_steps_profiles_nothing(lone_plan: MakePlan) -> None:
    trainer = Trainer(lone_plan("observe.profile=3", "observe.profile_steps=2"))
    trainer.train(4, 6)
    assert not trainer.said and not trainer.trace().exists()


def test_one_that_is_left_in_the_middle_leaves_nothing(lone_plan: MakePlan) -> None:
    trainer = Trainer(lone_plan("observe.profile=3", "observe.profile_steps=3"))
    trainer.train(1, 4)
    assert trainer.hooks() == 4
    trainer.profiler.close()
    trainer.profiler.close()
    assert trainer.hooks() == 0 and not trainer.trace().exists()
    trainer.train(2, 5)
    assert len(trainer.found().steps) == 3


def test_a_trace_that_cannot_be_written_ends_no_run(lone_plan: MakePlan) -> None:
    trainer = Trainer(lone_plan("observe.profile=3", "observe.profile_steps=1"))
    (trainer.plan.run_dir / "profile").write_text("in the way")
    trainer.train(1, 5)
    assert trainer.said[0].startswith("ALERT: there is no profile of steps 3 to 3")
