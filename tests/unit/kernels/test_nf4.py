"""NF4: the published values, the layout of bytes, and what rounding costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.facts.nf4_size import row_bytes, width_of
from shardwise.kernels import packed_rows
from shardwise.kernels.nf4 import CODE_BOOK, floats_of, pack
from shardwise.kernels.packed_rows import PackedProduct, pack_into

# The table of bitsandbytes' functional.py, and the middles of the decisions in its kernel.
PUBLISHED = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0
"""
MIDDLES = """
    -0.8480964004993439 -0.6106329262256622 -0.4599952697753906 -0.33967943489551544
    -0.23460740596055984 -0.13791173323988914 -0.045525018125772476 0.03979014977812767
    0.1202552504837513 0.2035212516784668 0.2920137718319893 0.3893125355243683
    0.5016634166240692 0.6427869200706482 0.8614784181118011
"""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def as_bits(text: str) -> list[int]:
    values: list[int] = torch.tensor([float(v) for v in text.split()]).view(torch.int32).tolist()
    return values


def test_the_code_book_is_the_published_one_to_the_bit() -> None:
    assert torch.tensor(CODE_BOOK).view(torch.int32).tolist() == as_bits(PUBLISHED)
    # Each value is itself again, two to a byte, the first in the upper bits.
    row = torch.tensor(CODE_BOOK).repeat(4)[None]
    packed = pack(row)
    assert packed[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert packed[0, 32] == 255
    assert torch.equal(floats_of(packed, torch.float32), row)


def test_what_lies_between_two_values_becomes_the_nearer_one() -> None:
    middles = torch.tensor([float(value) for value in MIDDLES.split()])
    row = torch.ones(64)
    row[:15], row[15:30] = middles - 1e-6, middles + 1e-6
    codes = pack(row[None])[0, :15]
    found = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
    assert found.tolist() == [*range(15), *range(1, 16)]


def test_rows_of_every_width_have_their_own_size() -> None:
    assert (row_bytes(64), row_bytes(4096), row_bytes(8192)) == (48, 2128, 4240)
    assert all(width_of(row_bytes(width)) == width for width in range(64, 2**17, 64))


def test_rounding_and_what_it_costs() -> None:
    weights = random(64, 1024)
    weights[1], weights[2, :64], weights[3, :64] = 0, 0, 1e-9
    made = floats_of(pack(weights), torch.float32)
    # Normal weights in blocks of 64 lose 9.1% with exact scales.
    assert float((made - weights).norm() / weights.norm()) == pytest.approx(0.092, abs=0.002)
    assert not made[1].any() and not made[2, :64].any()
    assert 0 < float(made[3, :64].abs().max()) < 0.02
    assert torch.equal(floats_of(pack(weights), torch.bfloat16), made.bfloat16())
    assert pack(torch.full((1, 64), torch.nan))[0, -4:].view(torch.float32).isnan()


def test_rows_are_quantised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random(3, 10, 256).bfloat16()
    whole = pack(weights)
    monkeypatch.setattr(packed_rows, "_AT_ONCE", 7 * 256)
    found = torch.empty_like(whole)
    pack_into(found, weights)
    assert torch.equal(found, whole)
    assert torch.equal(pack(weights[1, 3:5]), whole[1, 3:5])


def test_a_layer_saves_its_bytes_alone() -> None:
    packed, bias = pack(random(128, 64)), random(128)
    x = random(2, 5, 64).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = PackedProduct.apply(x, packed, bias)
    assert [(each.dtype, each.shape) for each in saved] == [(torch.uint8, packed.shape)]
    weight = floats_of(packed, torch.float32)
    torch.testing.assert_close(y, x @ weight.t() + bias)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach() @ weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels")
@pytest.mark.parametrize("shape", [(3, 64), (2, 70, 3072), (64, 28672)])
def test_a_gpu_makes_the_same_bits(shape: tuple[int, ...]) -> None:
    weights = random(*shape).bfloat16()
    packed = pack(weights)
    assert torch.equal(pack(weights.cuda()).cpu(), packed)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(floats_of(packed.cuda(), dtype).cpu(), floats_of(packed, dtype))


def test_compiled_layers_save_bytes_and_make_floats_twice() -> None:
    """The compiler could make the floats once, in forward, and keep them for backward."""
    packed = [pack(random(128, 64)), pack(random(64, 128))]

    def block(x: Tensor) -> Tensor:
        y: Tensor = PackedProduct.apply(x, packed[0], None)
        z: Tensor = PackedProduct.apply(torch.nn.functional.silu(y), packed[1], None)
        return x + z

    inputs = [random(10, 64).requires_grad_() for _ in range(2)]
    saved: list[Tensor] = []
    compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = [block(inputs[0]), compiled(inputs[1])]
    for result in results:
        result.square().sum().backward()
    assert {each.shape[0] for each in saved if each.is_floating_point()} == {10}
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-3)
