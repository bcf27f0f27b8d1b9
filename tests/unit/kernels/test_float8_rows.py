"""Frozen weights in float8: the layout of bytes, what rounding costs, and matmuls over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.kernels import float8_rows
from shardwise.kernels.float8 import BACKWARD, FORWARD
from shardwise.kernels.float8_rows import Float8Product, codes_of, floats_of, pack, steps_of
from shardwise.kernels.packed_rows import pack_into


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_float8_number_is_itself_again() -> None:
    codes = torch.arange(256).to(torch.uint8).view(FORWARD)
    row = codes.float().nan_to_num()[None]
    for power in (1.0, 2.0**-9, 2.0**20):
        packed = pack(row * power)
        assert packed.shape == (1, 256 + 16) and packed.dtype == torch.int8
        assert torch.equal(floats_of(packed, torch.float32), row * power)


def test_rounding_and_what_it_costs() -> None:
    weights = random(64, 1024)
    weights[1], weights[2], weights[3] = 0, weights[2] * 1e-6, weights[3] * 1e6
    made = floats_of(pack(weights), torch.float32)
    # Three digits after the first: at most 1/16 of each number, and 2.6% of normal ones.
    lost = (made - weights).norm(dim=1) / weights.norm(dim=1)
    assert lost[[0, *range(2, 64)]].tolist() == pytest.approx([0.026] * 63, abs=0.002)
    assert not made[1].any()
    assert torch.equal(floats_of(pack(weights), torch.bfloat16), made.bfloat16())
    weights[4, 5], weights[5, 6] = torch.nan, torch.inf
    finite = floats_of(pack(weights), torch.float32).isfinite().all(1)
    assert finite.tolist() == [row not in (4, 5) for row in range(64)]


def test_rows_are_packed_alone_and_scales_are_powers_of_two() -> None:
    weights = random(3, 10, 256).bfloat16()
    whole = pack(weights)
    found = torch.empty_like(whole)
    pack_into(found, weights)
    assert torch.equal(found, whole)
    assert torch.equal(pack(weights[1, 3:5]), whole[1, 3:5])
    steps = steps_of(whole)
    assert torch.equal(torch.frexp(steps).mantissa, torch.full((3, 10), 0.5))
    assert (codes_of(whole).float().abs().amax(-1) > 200).all()


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_a_scale_is_the_largest_that_fits(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    edges = torch.tensor([most, most * 2**-9, most * 2**20, 1.0, 3.0, 0.11])
    amax = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(edges / 2)])
    scale, step = float8_rows.power_scale(amax, dtype)
    assert torch.equal(scale * step, torch.ones_like(amax))
    assert (amax * scale <= most).all()
    assert (amax * scale * 2 > most).all()


def test_a_layer_multiplies_what_it_stores_and_saves_no_input() -> None:
    weights = random(128, 64) * torch.logspace(-3, 3, 128)[:, None]
    packed = pack(weights)
    x = random(2, 5, 64, seed=1).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = Float8Product.apply(x, packed, False)
    assert [each.dtype for each in saved] == [torch.int8, torch.float32]
    weight = floats_of(packed, torch.float32)
    cast = (x.detach() * 64).to(FORWARD).float() / 64  # the largest is below 7
    torch.testing.assert_close(y, cast @ weight.t())
    grad = random(2, 5, 128, seed=2)
    y.backward(grad)
    exact = grad @ weight
    # Gradients keep two digits after the first.
    assert float((x.grad - exact).norm() / exact.norm()) < 0.06
    assert not torch.equal(x.grad, exact)


def test_what_else_is_in_a_batch_changes_nothing() -> None:
    """Scales are powers of two, so a larger neighbour moves exponents alone."""
    # Numbers far below the largest one have fewer digits, so none is near zero.
    packed, x = pack(random(128, 64)), random(6, 64, seed=1)
    x += 0.1 * x.sign()
    grown = torch.cat([x, 30 * x[:1]])
    assert torch.equal(
        Float8Product.apply(grown, packed, True)[:6], Float8Product.apply(x, packed, True)
    )
    grads = random(6, 128, seed=2)
    both = [float8_rows.cast_columns(g, steps_of(packed)) for g in (grads, 64 * grads)]
    assert torch.equal(*((g8.float() * by / n) for (g8, by), n in zip(both, (1, 64), strict=True)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    packed, x = pack(random(32, 64)), random(4, 64, seed=1)
    x[1, 3] = value
    assert not Float8Product.apply(x, packed, False).isfinite().all()
    grad8, _ = float8_rows.cast_columns(x, torch.ones(64))
    assert not grad8.float().isfinite().all()


def test_compiled_layers_save_bytes_and_cast_an_input_once() -> None:
    """The compiler could transpose in forward, and keep it for backward."""
    packed = [pack(random(128, 64)), pack(random(128, 64, seed=1)), pack(random(64, 128))]

    def block(x: Tensor) -> Tensor:
        gate: Tensor = Float8Product.apply(x, packed[0], False)
        up: Tensor = Float8Product.apply(x, packed[1], False)
        z: Tensor = Float8Product.apply(torch.nn.functional.silu(gate) * up, packed[2], False)
        return x + z

    inputs = [random(10, 64).requires_grad_() for _ in range(2)]
    saved: list[Tensor] = []
    compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = [block(inputs[0]), compiled(inputs[1])]
    for result in results:
        result.square().sum().backward()
    assert {len(each) for each in saved if each.is_floating_point()} <= {10, 64, 128}
    assert {each.shape for each in saved if each.ndim == 2 and not each.is_floating_point()} == {
        each.shape for each in packed
    }
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels")
@pytest.mark.parametrize("shape", [(48, 64), (4096, 14336)])
def test_a_gpu_computes_the_same(shape: tuple[int, int]) -> None:
    weights = random(*shape).bfloat16()
    packed = pack(weights)
    there = packed.cuda()
    assert torch.equal(pack(weights.cuda()).cpu(), packed)
    assert torch.equal(steps_of(there).cpu(), steps_of(packed))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(floats_of(there, dtype).cpu(), floats_of(packed, dtype))
    x, grad = random(17, shape[1], seed=1).bfloat16(), random(17, shape[0], seed=2).bfloat16()
    cast, cast_there = (float8_rows.cast_columns(g, steps_of(p)) for g, p in
                        ((grad, packed), (grad.cuda(), there)))  # fmt: skip
    assert torch.equal(cast_there[0].cpu().float(), cast[0].float())
    assert torch.equal(cast_there[1].cpu(), cast[1])
    for device_x, device_packed in ((x, packed), (x.cuda(), there)):
        device_x.requires_grad_()
        Float8Product.apply(device_x, device_packed, True).backward(grad.to(device_x.device))
