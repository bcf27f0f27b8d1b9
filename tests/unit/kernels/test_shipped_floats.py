"""Rows in MXFP4 and in fp8 blocks: their bytes, their floats, and random weights in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantised_models import pack_fp8, pack_mxfp4
from shardwise.facts import fp8_block_size, mxfp4_size
from shardwise.kernels import fp8_blocks, mxfp4
from shardwise.kernels.packed_rows import PACKINGS, PackedGroupedProduct, PackedProduct, pack_into

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_rows_of_every_width_have_their_own_size() -> None:
    assert (mxfp4_size.row_bytes(64), mxfp4_size.row_bytes(2880)) == (48, 1536)
    assert (fp8_block_size.row_bytes(200), fp8_block_size.row_bytes(7168)) == (208, 7392)
    for size, step in ((mxfp4_size, 32), (fp8_block_size, 8)):
        assert all(size.width_of(size.row_bytes(w)) == w for w in range(step, 2**15, step))


def test_no_two_formats_have_one_dtype() -> None:
    assert {packing.base: dtype for dtype, packing in PACKINGS.items()} == {
        "nf4": torch.uint8,
        "float8": torch.int8,
        "mxfp4": torch.int32,
        "fp8": torch.int64,
    }
    for packing in PACKINGS.values():
        words = packing.row_words(1024)
        assert words * packing.dtype.itemsize == packing.row_bytes(1024)
        assert packing.width_of(words) == 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_of_mxfp4_are_those_of_transformers(dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (4, 16, 3, 16), generator=generator).byte()
    scales = torch.randint(64, 190, (4, 16, 3), generator=generator).byte()
    rows = mxfp4.join(blocks, scales)
    assert torch.equal(rows[..., :48], blocks.flatten(-2))
    assert torch.equal(rows[..., 48:51], scales)
    expected = module.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = mxfp4.floats_of(rows.view(torch.int32), dtype)
    assert torch.equal(found.mT, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_of_fp8_blocks_are_those_of_transformers(dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    operation = getattr(module, "Fp8Dequantize", None)
    if not hasattr(operation, "_dequantize_one"):
        pytest.skip("this transformers dequantises fp8 elsewhere")
    values, scales = pack_fp8(random(256, 384))
    made: Any = operation(None)
    expected = made._dequantize_one(values, scales, dtype)
    rows = fp8_blocks.join(values, scales.repeat_interleave(128, 0))
    assert torch.equal(fp8_blocks.floats_of(rows.view(torch.int64), dtype), expected)


@pytest.mark.parametrize(("base", "lost"), [("mxfp4", 0.12), ("fp8", 0.03)])
def test_random_weights_are_rounded_to_the_format(base: str, lost: float) -> None:
    (packing,) = (each for each in PACKINGS.values() if each.base == base)
    weights = random(3, 10, 320)
    weights[0, 0], weights[0, 1, :32] = 0, 0
    packed = torch.empty(3, 10, packing.row_words(320), dtype=packing.dtype)
    pack_into(packed, weights)
    made = packing.floats_of(packed, torch.float32, None)
    assert float((made - weights).norm() / weights.norm()) < lost
    assert not made[0, 0].any() and not made[0, 1, :32].any()
    again = torch.empty_like(packed)
    pack_into(again, made)
    assert torch.equal(packing.floats_of(again, torch.float32, None), made)


def test_published_weights_may_be_packed_again() -> None:
    blocks, scales = pack_mxfp4(random(2, 64, 5))
    rows = mxfp4.join(blocks, scales).view(torch.int32)
    floats = mxfp4.floats_of(rows, torch.float32)
    assert torch.equal(mxfp4.floats_of(mxfp4.pack(floats).view(torch.int32), torch.float32), floats)


def test_layers_save_their_bytes_alone() -> None:
    packed = fp8_blocks.pack(random(128, 64)).view(torch.int64)
    stack = mxfp4.pack(random(4, 24, 64)).view(torch.int32)
    x = random(10, 64).requires_grad_()
    ends = torch.tensor([2, 2, 7, 10], dtype=torch.int32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = PackedProduct.apply(x, packed, None)
        z = PackedGroupedProduct.apply(x, stack, ends, False)
    assert {each.dtype for each in saved} == {torch.int64, torch.int32}
    weight = fp8_blocks.floats_of(packed, torch.float32)
    torch.testing.assert_close(y, x @ weight.t())
    experts = mxfp4.floats_of(stack, torch.float32)
    parts = [x[a:b] @ experts[e].t() for e, (a, b) in enumerate([(0, 2), (2, 2), (2, 7), (7, 10)])]
    torch.testing.assert_close(z, torch.cat(parts))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels")
def test_a_gpu_makes_the_same_bits() -> None:
    rows = mxfp4.pack(random(2, 70, 2880)).view(torch.int32)
    blocks = fp8_blocks.pack(random(2, 70, 7168)).view(torch.int64)
    for dtype in (*DTYPES, torch.float16):
        assert torch.equal(mxfp4.floats_of(rows.cuda(), dtype).cpu(), mxfp4.floats_of(rows, dtype))
        found = fp8_blocks.floats_of(blocks.cuda(), dtype).cpu()
        assert torch.equal(found, fp8_blocks.floats_of(blocks, dtype))
