"""Experts in float8 on a Hopper: the numbers of a CPU's emulation, near bf16, and faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.kernels import float8_experts
from shardwise.kernels.hopper import on_hopper
from shardwise.parallel.expert_pass import Experts
from shardwise.parallel.grouped_products import product, row_grad, weight_grad

pytestmark = pytest.mark.skipif(
    not on_hopper(), reason="torch sees no Hopper GPU: nothing here was tested"
)
# One expert has no row, one a single row, and no end is a multiple of 16.
ENDS = torch.tensor([300, 300, 301, 1000, 1777], dtype=torch.int32)
ROWS, HIDDEN, WIDTH = 1777, 512, 768


def random(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (made * torch.logspace(-2, 2, shape[-2])[:, None]).bfloat16()


def stack(lies_turned: bool) -> Tensor:
    made = random(len(ENDS), WIDTH, HIDDEN)
    return made.mT.contiguous().mT if lies_turned else made


@pytest.mark.parametrize("lies_turned", [False, True])
def test_casts_are_those_of_plain_torch_to_the_last_bit(lies_turned: bool) -> None:
    places = float8_experts.spread_ends(ENDS)
    used = int(places[-1])
    calls: list[Callable[[str], tuple[Tensor, Tensor]]] = [
        lambda device: float8_experts.cast_rows(random(ROWS, HIDDEN).to(device)),
        lambda device: float8_experts.cast_rows(stack(lies_turned).to(device)),
        lambda device: float8_experts.cast_turned(stack(lies_turned).to(device)),
    ]
    for call in calls:
        for one, other in zip(call("cuda"), call("cpu"), strict=True):
            assert torch.equal(one.cpu().float(), other.float())
    (found, steps), (expected, others) = (
        float8_experts.cast_grouped_columns(
            random(ROWS, HIDDEN).to(device), ENDS.to(device), places.to(device)
        )
        for device in ("cuda", "cpu")
    )
    assert torch.equal(found.cpu().float()[:, :used], expected.float()[:, :used])
    assert torch.equal(steps.cpu(), others)


@pytest.mark.parametrize("lies_turned", [False, True])
def test_products_are_those_of_the_rounded_numbers(lies_turned: bool) -> None:
    x, grad, weight = random(ROWS, HIDDEN), random(ROWS, WIDTH, seed=1), stack(lies_turned)
    made = {
        device: [
            each.cpu().float()
            for each in (
                product(x.to(device), weight.to(device), ENDS.to(device), float8=True),
                row_grad(grad.to(device), weight.to(device), ENDS.to(device), float8=True),
                weight_grad(*(t.to(device) for t in (weight, grad, x, ENDS)), float8=True),
            )
        ]
        for device in ("cuda", "cpu")
    }
    # Sums in forward are kept in fewer bits.
    for one, other, bound in zip(made["cuda"], made["cpu"], (2e-2, 1e-2, 1e-2), strict=True):
        assert one.shape == other.shape and one.isfinite().all()
        assert (one - other).norm() < bound * other.norm()


def test_a_pass_is_near_that_of_bf16_and_faster() -> None:
    """Experts of Mixtral's size, 8,192 tokens, forward and backward, compiled as in a run."""
    count, hidden, width, chosen, tokens = 8, 4096, 14336, 2, 8192
    torch.manual_seed(0)
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **new, requires_grad=True)  # type: ignore[call-overload]
    stacks = [
        (torch.randn(*shape, **new) / shape[-1] ** 0.5).requires_grad_()  # type: ignore[call-overload]
        for shape in ((count, 2 * width, hidden), (count, hidden, width))
    ]
    experts = torch.rand(tokens, count, device="cuda").topk(chosen).indices
    shares = torch.full((tokens, chosen), 0.5, **new)  # type: ignore[call-overload]

    def run(float8: bool) -> tuple[list[Tensor], float]:
        compiled = torch.compile(lambda: Experts.apply(x, experts, shares, *stacks, float8))
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made = compiled()
            grads = torch.autograd.grad(made.float().square().mean(), [x, *stacks])
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return [made.detach(), *grads], min(times[2:])

    (exact, plain_ms), (found, float8_ms) = run(False), run(True)
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other.float()).norm() < 0.1 * other.float().norm()
    print(f"bf16 {plain_ms:.1f} ms, float8 {float8_ms:.1f} ms, {plain_ms / float8_ms:.2f} x")
    assert float8_ms < plain_ms
