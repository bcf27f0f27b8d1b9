from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config.schema import ClusterConfig, OptimConfig, RunConfig, TrainConfig
from shardwise.launch.prepare import choose_plan
from shardwise.training.optim import (
    build_optimizer,
    learning_rate,
    set_learning_rate,
    step_if_finite,
)

STEPS = 100


def rates(**settings: Any) -> list[float]:
    optim = OptimConfig(**{"lr": 1.0, "decay_steps": STEPS // 10, **settings})
    return [learning_rate(optim, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_rises_in_equal_steps_to_the_peak(schedule: str) -> None:
    found = rates(schedule=schedule, warmup_steps=10)
    assert found[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert found[9] == found[10] == 1.0
    assert max(found) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_least_rate(schedule: str, ratio: float) -> None:
    found = rates(schedule=schedule, warmup_steps=10, min_lr_ratio=ratio)
    assert found[-1] == pytest.approx(ratio)
    assert min(found[10:]) == found[-1]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_never_rises_after_warmup(schedule: str) -> None:
    found = rates(schedule=schedule, warmup_steps=10)[9:]
    assert found == sorted(found, reverse=True)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert rates(schedule="cosine")[0] == 1.0


def test_cosine_and_linear_meet_in_the_middle() -> None:
    optim = {"lr": 1.0, "min_lr_ratio": 0.0}
    for schedule in ("cosine", "linear"):
        config = OptimConfig(schedule=schedule, **optim)  # type: ignore[arg-type]
        assert learning_rate(config, 50, 101) == pytest.approx(0.5)
    cosine = OptimConfig(schedule="cosine", **optim)  # type: ignore[arg-type]
    assert learning_rate(cosine, 25, 101) == pytest.approx(0.853553, rel=1e-5)


def test_wsd_is_flat_until_its_decay() -> None:
    found = rates(schedule="wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    assert set(found[9:80]) == {1.0}
    assert found[80] == pytest.approx(0.95)
    assert found[89] == pytest.approx(0.5)
    assert found[99] == 0.0


def test_wsd_decays_over_a_tenth_unless_told() -> None:
    config = RunConfig(train=TrainConfig(steps=STEPS), optim=OptimConfig(lr=1.0, schedule="wsd"))
    optim = choose_plan(replace(config, cluster=ClusterConfig(name="1xCPU"))).settings.optim
    assert learning_rate(optim, 89, STEPS) == 1.0
    assert learning_rate(optim, 90, STEPS) < 1.0


def test_constant_stays() -> None:
    assert set(rates(schedule="constant")) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_short_runs_have_finite_rates(schedule: str) -> None:
    optim = OptimConfig(lr=1.0, schedule=schedule, decay_steps=1)  # type: ignore[arg-type]
    for steps in (1, 2, 3):
        assert all(0 < learning_rate(optim, step, steps) <= 1 for step in range(steps))


def optimizer_of(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    config = RunConfig(cluster=ClusterConfig(name="1xCPU"), optim=OptimConfig(**settings))
    return build_optimizer(model, choose_plan(config, {}))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))
    optimizer = optimizer_of(model, weight_decay=0.3, lr=0.2, betas=(0.5, 0.6), eps=1e-5)
    decayed, others = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4), (3, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert all(group["betas"] == (0.5, 0.6) for group in optimizer.param_groups)
    assert all(group["eps"] == 1e-5 for group in optimizer.param_groups)


def test_embeddings_do_not_decay_where_that_is_said() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False))
    model[2].weight = model[0].weight  # a tied head
    optimizer = optimizer_of(model, decay_embeddings=False)
    decayed, others = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(3, 4), (4,)]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    groups = optimizer_of(model).param_groups
    assert sum(len(group["params"]) for group in groups) == 2


def test_a_model_of_matrices_has_one_group() -> None:
    assert len(optimizer_of(nn.Linear(4, 4, bias=False)).param_groups) == 1


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4)])
def test_the_rate_reaches_every_group(make: Callable[[], nn.Module]) -> None:
    optimizer = optimizer_of(make())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.fixture
def twins() -> list[tuple[nn.Linear, torch.optim.AdamW]]:
    """Two equal layers with equal gradients and fused optimizers."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.load_state_dict(first.state_dict())
    for layer in (first, second):
        layer(torch.arange(8.0)).square().sum().backward()
    return [
        (layer, torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True))
        for layer in (first, second)
    ]


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_an_update_clips_on_its_way(
    twins: list[tuple[nn.Linear, torch.optim.AdamW]], limit: float | None
) -> None:
    (ours, fused), (plain, stock) = twins
    for _ in range(3):
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in ours.parameters() if p.grad is not None]
        )
        step_if_finite(fused, norm, limit)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf") if limit is None else limit)
        stock.step()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.grad is not None and theirs.grad is not None
            mine.grad.copy_(theirs.grad * 2)
            theirs.grad.mul_(2)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_an_update_without_a_finite_norm_changes_nothing(
    twins: list[tuple[nn.Linear, torch.optim.AdamW]], norm: float
) -> None:
    (layer, optimizer), (untouched, _) = twins
    step_if_finite(optimizer, torch.tensor(norm), 1.0)
    for mine, theirs in zip(layer.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state[mine]["step"] == 0
        assert not optimizer.state[mine]["exp_avg"].any()
