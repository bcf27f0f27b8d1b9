"""Kernels of our own: on GPUs with Triton, and said where they are missing."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import nn

from shardwise.config.plain import config_from_dict
from shardwise.errors import UserError
from shardwise.kernels import own
from shardwise.launch.prepare import choose_plan
from shardwise.plan.plan import Plan
from shardwise.training.optim import OnePassAdamW, build_optimizer


def plan_for(cluster: str, kernels: str = "auto") -> Plan:
    sections = {
        "model": {"name": "tiny-llama"},
        "data": {"source": "synthetic"},
        "cluster": {"name": cluster},
        "train": {"kernels": kernels},
    }
    return choose_plan(config_from_dict(sections))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether there is one, as the test says."""
    here = {"installed": True}
    spec = ModuleSpec("triton", None)
    monkeypatch.setattr(own, "find_spec", lambda name: spec if here["installed"] else None)
    return here


@pytest.mark.parametrize(
    ("cluster", "kernels", "expected"),
    [
        ("8xH100", "auto", OnePassAdamW),
        ("8xH100", "torch", torch.optim.AdamW),
        ("2xCPU", "auto", torch.optim.AdamW),
    ],
)
def test_the_optimizer_is_that_of_the_plan(
    triton: dict[str, bool], cluster: str, kernels: str, expected: type
) -> None:
    plan = plan_for(cluster, kernels)
    assert type(build_optimizer(nn.Linear(4, 4), plan)) is expected
    assert own.kernels_note(plan) is None


def test_without_triton_it_is_torchs_and_that_is_said(triton: dict[str, bool]) -> None:
    triton["installed"] = False
    plan = plan_for("8xH100")
    assert type(build_optimizer(nn.Linear(4, 4), plan)) is torch.optim.AdamW
    assert "Triton is not installed" in (own.kernels_note(plan) or "")
    with pytest.raises(UserError, match="needs Triton"):
        own.kernels_note(plan_for("8xH100", "own"))
