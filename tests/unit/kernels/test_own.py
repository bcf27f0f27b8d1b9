"""Kernels of our own: on GPUs with Triton, and said where they are missing."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest
import torch
from torch import nn

from shardwise.config.plain import config_from_dict
from shardwise.errors import UserError
from shardwise.kernels import hopper, own
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.training.optim import OnePassAdamW, ShardAdamW, build_optimizer


def plan_for(cluster: str, kernels: str = "auto", **more: dict[str, object]) -> Plan:
    sections = {
        "model": {"name": "tiny-llama"},
        "data": {"source": "synthetic"},
        "cluster": {"name": cluster},
        "train": {"kernels": kernels},
        **more,
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
        ("8xH100", "torch", ShardAdamW),
        ("2xCPU", "auto", ShardAdamW),
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
    assert type(build_optimizer(nn.Linear(4, 4), plan)) is ShardAdamW
    assert "Triton is not installed" in (own.kernels_note(plan) or "")
    with pytest.raises(UserError, match="needs Triton"):
        own.kernels_note(plan_for("8xH100", "own"))


def test_without_quack_swiglu_comes_after_its_matmuls_and_that_is_said(
    triton: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for("8xH100")
    monkeypatch.setattr(own, "has_quack", lambda: False)
    assert own.kernels_note(plan) is None  # this machine's GPU, or its lack, is no Hopper
    monkeypatch.setattr(own, "on_hopper", lambda: True)
    assert "quack-kernels" in (own.kernels_note(plan) or "")
    float8 = {"linear": "float8", "float8_min_features": 64}
    others = plan_for("8xH100", "torch"), plan_for("8xH100", precision=float8)
    assert [own.kernels_note(other) for other in others] == [None, None]


def test_a_quack_that_does_not_work_is_an_error_before_the_first_step(
    triton: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for("8xH100")
    monkeypatch.setattr(own, "on_hopper", lambda: True)
    monkeypatch.setattr(own, "has_quack", lambda: True)
    monkeypatch.setitem(sys.modules, "shardwise.kernels.swiglu_quack", None)
    with pytest.raises(UserError, match="does not work") as caught:
        own.kernels_note(plan)
    assert "swiglu_quack" in (caught.value.why or "") and "shardwise[quack]" in str(caught.value)
    working = ModuleType("shardwise.kernels.swiglu_quack")
    monkeypatch.setitem(sys.modules, working.__name__, working)
    assert own.kernels_note(plan) is None


@pytest.mark.parametrize(
    ("installed", "expected"),
    [("0.6.3", False), ("0.6.4", True), ("0.6.10.post1", True), ("0.7.0", False), (None, False)],
)
def test_a_quack_is_known_or_not_used(
    installed: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "quack-kernels"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(hopper, "version", version)
    assert hopper.has_quack.__wrapped__() is expected


@pytest.mark.parametrize(
    ("available", "capability", "expected"),
    [(True, (9, 0), True), (True, (8, 0), False), (True, (10, 0), False), (False, None, False)],
)
def test_a_hopper_is_known_by_its_capability(
    available: bool,
    capability: tuple[int, int] | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert hopper.on_hopper.__wrapped__() is expected
