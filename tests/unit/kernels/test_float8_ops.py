"""Casts to float8: what the plain operators do, and that a GPU's kernels do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.float8 import (
    BACKWARD,
    FORWARD,
    amax_of,
    cast,
    cast_both,
    scale_of,
    swiglu_amax,
    swiglu_cast,
    swiglu_grad_amax,
    swiglu_grad_cast,
    transposed,
)

FORMATS = [FORWARD, BACKWARD]
# Whole tiles of a kernel, and none.
SHAPES = [(256, 512), (301, 77)]


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().to(device)


def halves(*shape: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    gate, up, grad = (random(*shape, seed=seed, device=device) for seed in range(3))
    return gate, up, grad


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_number_fills_the_format(dtype: torch.dtype) -> None:
    x = random(8, 16)
    scale = scale_of(amax_of(x), dtype)
    assert cast(x, scale, dtype).float().abs().max() == torch.finfo(dtype).max
    # Half a step of the format: three digits, or two.
    step = 2 ** -(4 if dtype == FORWARD else 3)
    back = cast(x, scale, dtype).float() / scale
    torch.testing.assert_close(back, x.float(), rtol=step, atol=1e-3)


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_too_large_is_cut_off_and_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e9, -1e9, float("nan"), 0.0]])
    made = cast(x, torch.ones(()), dtype).float()[0]
    most = torch.finfo(dtype).max
    assert made[:2].tolist() == [most, -most]
    assert made[2].isnan() and made[3] == 0.0


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(4, 4)
    assert not cast(x, scale_of(x.abs().amax(), FORWARD), FORWARD).float().any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_both_copies_are_one(dtype: torch.dtype) -> None:
    x = random(48, 80)
    rows, columns = cast_both(x, torch.ones(()), dtype)
    assert torch.equal(rows.float().t(), columns.float()) and columns.is_contiguous()
    assert torch.equal(transposed(rows, x).float(), columns.float())


def test_gradients_of_swiglu_are_those_of_autograd() -> None:
    gate, up, grad = (each.float().requires_grad_() for each in halves(16, 32))
    (F.silu(gate) * up).backward(grad)
    assert gate.grad is not None and up.grad is not None
    found = swiglu_grad_amax(gate.detach(), up.detach(), grad.detach())
    torch.testing.assert_close(found, torch.stack([gate.grad.abs().max(), up.grad.abs().max()]))
    scales = torch.ones(3)
    made = swiglu_grad_cast(gate.detach(), up.detach(), grad.detach(), scales)
    expected = (gate.grad, up.grad, (F.silu(gate) * up).detach())
    for index, each in zip((0, 2, 4), expected, strict=True):
        exact = each.t() if index == 4 else each
        torch.testing.assert_close(made[index].float(), exact, rtol=0.125, atol=2e-3)
    assert torch.equal(made[0].float().t(), made[1].float())
    assert torch.equal(made[2].float().t(), made[3].float())


OPERATORS: dict[str, Callable[[str, tuple[int, int]], Any]] = {
    "cast": lambda on, at: cast(random(*at, device=on), torch.ones((), device=on) * 99, FORWARD),
    "cast both": lambda on, at: cast_both(
        random(*at, device=on), torch.ones((), device=on) * 9999, BACKWARD
    ),
    "cast both forward": lambda on, at: cast_both(
        random(*at, device=on), torch.ones((), device=on) * 99, FORWARD
    ),
    "transposed": lambda on, at: transposed(
        random(*at, device=on).to(FORWARD), torch.ones((), device=on)
    ),
    "amax": lambda on, at: amax_of(random(*at, device=on)),
    "amax of swiglu": lambda on, at: swiglu_amax(*halves(*at, device=on)[:2]),
    "swiglu": lambda on, at: swiglu_cast(
        *halves(*at, device=on)[:2], torch.ones((), device=on) * 50
    ),
    "amax of gradients": lambda on, at: swiglu_grad_amax(*halves(*at, device=on)),
    "gradients": lambda on, at: swiglu_grad_cast(
        *halves(*at, device=on), torch.tensor([9e3, 8e3, 50.0], device=on)
    ),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_gpu_writes_the_same_bytes(name: str, shape: tuple[int, int]) -> None:
    ours, plain = (OPERATORS[name](device, shape) for device in ("cuda", "cpu"))
    for kernel, reference in zip(
        *((each,) if isinstance(each, Tensor) else each for each in (ours, plain)), strict=True
    ):
        if reference.dtype == torch.float32:
            torch.testing.assert_close(kernel.cpu(), reference)
        else:
            # A sigmoid may round otherwise, and then one number in thousands does.
            differ = kernel.cpu().view(torch.uint8) != reference.view(torch.uint8)
            assert differ.float().mean() < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels")
def test_on_a_gpu_what_is_no_number_stays_none() -> None:
    gate, up, grad = halves(256, 512, device="cuda")
    gate[3, 5] = float("nan")
    one = torch.ones((), device="cuda")
    assert cast(gate, one, FORWARD).float().isnan().sum() == 1
    assert amax_of(gate).isnan() and swiglu_amax(gate, up).isnan()
    assert swiglu_grad_amax(gate, up, grad).isnan().all()
    made = swiglu_grad_cast(gate, up, grad, torch.ones(3, device="cuda"))
    assert [each.float().isnan().sum().item() for each in made] == [1, 1, 1, 1, 1]
