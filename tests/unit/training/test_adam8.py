from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.kernels.adamw import chance_of
from shardwise.training import adam8
from shardwise.training.adam8 import Adam8, decode, encode, has_codes


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 300, bias=False))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_stand_for_what_was_coded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    moment = torch.randn(5, 700) * torch.logspace(-6, 0, 5)[:, None]
    moment = moment if dtype == torch.int8 else moment.square()
    codes, scales = encode(moment, dtype, chance_of(moment, 1, 0))
    assert codes.dtype == dtype and codes.shape == moment.shape and scales.shape == (5, 3)
    blocks = scales.repeat_interleave(256, 1)[:, :700]
    off = (decode(codes, scales) - moment).abs() / blocks
    assert off.max() < 2.0 / 127
    # What was decoded is coded as before: the largest number of a block gives its scale again.
    again = encode(decode(codes, scales), dtype, torch.full_like(codes, 2**31, dtype=torch.int64))
    assert torch.equal(again[1], scales) and (again[0].int() - codes.int()).abs().max() <= 1


def test_changes_smaller_than_a_code_add_up() -> None:
    moment = torch.ones(1, 256)
    moment[0, 1:] = 0.5001
    found = [decode(*encode(moment, torch.int8, chance_of(moment, n, 0))) for n in range(200)]
    assert torch.stack(found)[:, 0, 1:].mean().item() == pytest.approx(0.5001, abs=1e-4)


def test_zeros_stay_zero_and_small_squares_do_not_become_it() -> None:
    square = torch.zeros(1, 256)
    square[0, :2] = torch.tensor([1.0, 1e-12])
    codes, scales = encode(square, torch.uint8, torch.zeros(1, 256, dtype=torch.int64))
    assert codes[0, 1] == 1 and not codes[0, 2:].any() and not decode(codes, scales)[0, 2:].any()


def test_it_follows_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls as with torch's AdamW, and so do the parameters, in chunks of rows too."""
    monkeypatch.setattr(adam8, "_CHUNK", 8000)
    x, wanted = torch.randn(64, 96), make(1)
    losses = {}
    for kind in (torch.optim.AdamW, Adam8):
        model = make()
        optimizer = kind(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(100):
            loss = (model(x) - wanted(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = loss.item()
    first = (make()(x) - wanted(x)).square().mean().item()
    assert losses[torch.optim.AdamW] < first / 20
    assert losses[Adam8] < first / 15


def test_state_is_a_quarter_and_comes_back_as_it_was() -> None:
    model = make()
    optimizer = Adam8(model.parameters(), lr=1e-3)
    model(torch.randn(4, 96)).sum().backward()
    optimizer.step()
    matrices = [param for param in model.parameters() if has_codes(param)]
    assert [tuple(param.shape) for param in matrices] == [(80, 96), (300, 80)]
    state = optimizer.state[matrices[1]]
    assert {name: value.dtype for name, value in state.items() if name != "step"} == {
        **{"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
        **{"exp_avg_scale": torch.float32, "exp_avg_sq_scale": torch.float32},
    }
    other = Adam8(model.parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for name, value in optimizer.state[param].items():
            assert torch.equal(other.state[param][name], value)
            assert other.state[param][name].dtype == value.dtype
