"""Lion is the formula of its paper, written here number by number."""

from __future__ import annotations

import math

import torch
from torch import nn

from shardwise.training.lion import ShardLion

LR, DECAY, FOR_UPDATE, FOR_MEAN = 0.01, 0.1, 0.9, 0.99


def by_hand(value: float, grads: list[float]) -> float:
    mean = 0.0
    for grad in grads:
        mixed = FOR_UPDATE * mean + (1 - FOR_UPDATE) * grad
        direction = math.copysign(1.0, mixed) if mixed else 0.0
        value -= LR * (direction + DECAY * value)
        mean = FOR_MEAN * mean + (1 - FOR_MEAN) * grad
    return value


def test_lion_is_the_formula_of_its_paper() -> None:
    values = [[1.0, -2.0], [3.0, 0.5]]
    # Signs that change, a mean that outweighs a small gradient, and a number that never moves.
    grads = [[[4.0, -1.0], [0.0, 1e-3]], [[-0.1, 2.0], [0.0, -5.0]], [[-7.0, 2.0], [0.0, 1e-9]]]
    param = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    optimizer = ShardLion([param], lr=LR, betas=(FOR_UPDATE, FOR_MEAN), weight_decay=DECAY)
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    expected = [
        [by_hand(values[row][column], [grad[row][column] for grad in grads]) for column in (0, 1)]
        for row in (0, 1)
    ]
    torch.testing.assert_close(param.detach(), torch.tensor(expected, dtype=torch.float64))
    assert [*optimizer.state[param]] == ["exp_avg"]


def test_a_parameter_without_a_gradient_stays() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = ShardLion([param], lr=LR, betas=(FOR_UPDATE, FOR_MEAN), weight_decay=DECAY)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3)) and not optimizer.state
