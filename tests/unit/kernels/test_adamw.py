"""AdamW in one pass against torch's own: the same numbers, the same state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.training.optim import OnePassAdamW, step_if_finite

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(100, 33), (77,), (0, 4)]
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(device)) for shape in shapes]


def train(cls: type[torch.optim.AdamW], device: str, clip: float | None) -> list[Tensor]:
    """Five updates, of which the third has a gradient that is not finite."""
    params = parameters(device)
    optimizer = cls(params, **SETTINGS)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        if step == 2:
            params[0].grad[0, 0] = float("nan")  # type: ignore[index]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])  # type: ignore[misc]
        step_if_finite(optimizer, norm, clip)
    state = [optimizer.state[param] for param in params]
    names = ("step", "exp_avg", "exp_avg_sq")
    return [
        *(param.detach() for param in params),
        *(each[name] for each in state for name in names),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_it_is_torchs_adamw(device: str, clip: float | None) -> None:
    ours, theirs = (train(cls, device, clip) for cls in (OnePassAdamW, torch.optim.AdamW))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_its_state_goes_into_torchs_and_back() -> None:
    params = parameters("cpu")
    ours = OnePassAdamW(params, **SETTINGS)  # type: ignore[arg-type]
    for param in params:
        param.grad = torch.ones_like(param)
    step_if_finite(ours, torch.tensor(1.0), None)
    theirs = torch.optim.AdamW(params, **SETTINGS)  # type: ignore[arg-type]
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[params[0]]["step"] == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_nothing() -> None:
    params = parameters("cuda")
    optimizer = OnePassAdamW(params, **SETTINGS)  # type: ignore[arg-type]
    for param in params:
        param.grad = torch.ones_like(param)
    norm = torch.ones((), device="cuda")
    step_if_finite(optimizer, norm, 1.0)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_if_finite(optimizer, norm, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_hooks_are_called() -> None:
    params = parameters("cpu")
    optimizer = OnePassAdamW(params, **SETTINGS)  # type: ignore[arg-type]
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for param in params:
        param.grad = torch.ones_like(param)
    step_if_finite(optimizer, torch.tensor(1.0), None)
    assert seen == ["before", "after"]
