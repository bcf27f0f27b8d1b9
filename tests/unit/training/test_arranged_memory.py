"""What stays on a GPU is allocated first, and what the first step leaves behind is given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.training import step as step_module
from shardwise.training.optim import OnePassAdamW, allocate_state
from shardwise.training.step import Stepper


def test_memory_is_arranged_around_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(step_module, "allocate_state", lambda optimizer: said.append("state"))
    monkeypatch.setattr(step_module, "give_back", lambda device: said.append("give back"))
    stepper: Any = Stepper.__new__(Stepper)
    stepper.num_run, stepper.optimizer, stepper.device = 0, None, torch.device("cpu")
    told = []
    for _ in range(4):
        stepper._arrange_memory()
        told.append(said.copy())
        said.clear()
    assert told == [["state"], ["give back"], [], []]


def test_state_exists_before_a_step_and_is_what_a_step_would_make() -> None:
    def optimizer_of(param: torch.Tensor) -> OnePassAdamW:
        return OnePassAdamW([param], lr=0.1)

    early, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    ours, usual = optimizer_of(early), optimizer_of(late)
    allocate_state(ours)
    assert set(ours.state[early]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(not value.any() for value in ours.state[early].values())
    for param, optimizer in ((early, ours), (late, usual)):
        param.grad = torch.tensor([1.0, -2.0, 3.0])
        optimizer.step()
    assert torch.equal(early, late)
    assert all(torch.equal(ours.state[early][n], v) for n, v in usual.state[late].items())
