"""Muon and Adafactor over parameters that nobody shards are torch's own, to the last digits."""

from __future__ import annotations

import copy

import torch
from torch import nn

from shardwise.training.whole import MuonAdamW, ShardAdafactor


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, param in one.named_parameters():
        torch.testing.assert_close(param, other.get_parameter(name), rtol=1e-6, atol=1e-7)


def test_muon_is_torchs_and_the_rest_is_adamw() -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())

    def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = list(model.parameters())
        return [p for p in params if p.dim() == 2], [p for p in params if p.dim() == 1]

    matrices, vectors = split(ours)
    groups = [
        {"params": matrices, "weight_decay": 0.1, "orthogonal": True},
        {"params": vectors, "weight_decay": 0.0, "orthogonal": False},
    ]
    steps(ours, [MuonAdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)])
    matrices, vectors = split(theirs)
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    steps(theirs, [muon, adamw])
    assert_same(ours, theirs)
    assert not torch.equal(next(ours.parameters()), next(small_model().parameters()))


def test_adafactor_is_torchs() -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())
    optimizer = ShardAdafactor(ours.parameters(), lr=0.01, weight_decay=0.1)
    steps(ours, [optimizer])
    steps(theirs, [torch.optim.Adafactor(theirs.parameters(), lr=0.01, weight_decay=0.1)])
    assert_same(ours, theirs)
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values())
    assert held == 4 + (6 + 10) + 10 + (10 + 3) + 3
