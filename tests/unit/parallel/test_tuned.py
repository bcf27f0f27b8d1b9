"""Linear layers whose matmuls name their algorithm: the same numbers and the same parameters."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.plain import config_from_dict
from shardwise.kernels.matmul import Tuned
from shardwise.launch.prepare import choose_plan
from shardwise.parallel import tuned
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.remat import apply_remat
from shardwise.plan.plan import Plan

WIDTH, SEQUENCES, LENGTH = 32, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))
        return out


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """With a tuner that finds torch's own choice, ten per cent faster."""
    monkeypatch.setattr(tuned, "tune", lambda problem: Tuned("", 0.9, 1.0))
    return choose_plan(
        config_from_dict(
            {
                "model": {"name": "llama-3.2-1b"},
                "data": {"source": "synthetic", "seq_len": LENGTH},
                "cluster": {"name": "1xH100"},
                "train": {"micro_batch": SEQUENCES, "matmul": "tuned"},
            }
        ),
        environ={},
    )


def gradients(model: nn.Module, sequences: int = SEQUENCES) -> list[Tensor]:
    model.zero_grad()
    hidden = torch.randn(sequences, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    model(hidden).square().sum().backward()
    return [tensor.grad for tensor in (hidden, *model.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("remat", ["none", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_the_same(plan: Plan, remat: str, compiled: bool) -> None:
    plain = Block()
    model = deepcopy(plain)
    tuned.take_tuned([model], plan)
    apply_remat([model], remat)
    if compiled:
        apply_compile([model])
    for found, expected in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found.stride() == expected.stride()
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_another_number_of_tokens_is_left_to_torch(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Block()
    model = deepcopy(plain)
    tuned.take_tuned([model], plan)
    monkeypatch.setattr(tuned, "matmul", None)
    pairs = zip(gradients(model, 3), gradients(plain, 3), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_a_frozen_weight_gets_no_gradient(plan: Plan) -> None:
    model = Block()
    model.up.weight.requires_grad_(False)
    tuned.take_tuned([model], plan)
    assert len(gradients(model)) == 5 and model.up.weight.grad is None


def test_it_says_what_was_gained(plan: Plan) -> None:
    model = Block()
    assert (
        "no layer is plain" in (tuned.tuned_note(model, plan) or "") or torch.version.cuda is None
    )
    tuned.take_tuned([model], plan)
    note = "matmuls of 2 linear layers are tuned: 5,400 ms for 32 tokens instead of 6,000"
    assert tuned.tuned_note(model, plan) == note
