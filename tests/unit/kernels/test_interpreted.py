"""The Triton kernels without a GPU: Triton's interpreter runs them line by line.

`make test` has Triton for this alone, in a folder of its own, and sets TRITON_INTERPRET. What a GPU
makes of the same lines is tested beside each kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.kernels import (
    adamw,
    clamped_swiglu,
    experts,
    float8,
    float8_experts,
    float8_rows,
    fp8_blocks,
    mxfp4,
    nf4,
)
from shardwise.kernels.cross_entropy import IGNORE_INDEX, turn_into_gradient
from shardwise.kernels.swiglu import ACTIVATIONS, gated, gated_grads

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not set: no kernel was run", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed: no kernel was run")

from shardwise.kernels import (
    adamw_triton,
    clamped_swiglu_triton,
    cross_entropy_triton,
    experts_triton,
    float8_experts_triton,
    float8_rows_triton,
    float8_triton,
    fp8_blocks_triton,
    mxfp4_triton,
    nf4_triton,
    swiglu_triton,
    unit_copies_triton,
)

# Whole tiles of a kernel, and none.
SHAPES = [(128, 256), (70, 130)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("index", [0, 1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(dtype: torch.dtype, index: int) -> None:
    known = torch.tensor([0.0, 1.5, 0.2, 0.1, 7.0])
    numbers = [1e-2, 0.9, 0.95, 1e-8, 0.1]
    param, grad, mean = (random(5000, seed=seed) for seed in range(3))
    given = [param, grad, mean.to(dtype), mean.square().to(dtype)]
    ours, plain = ([each.clone() for each in given] for _ in range(2))
    adamw_triton.launch(*ours, known, numbers, index)
    # The same tensor at the same place of the list, which decides how it is rounded.
    empty = [torch.zeros(0)] * index
    adamw.update(*([*empty, each] for each in plain), known, numbers)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ours[0], param)


def test_adamw_that_leaves_an_update_out() -> None:
    given = [random(100, seed=seed) for seed in range(4)]
    made = [each.clone() for each in given]
    known = torch.tensor([1.0, 1.0, 0.2, 0.1, 7.0])
    adamw_triton.launch(*made, known, [1e-2, 0.9, 0.95, 1e-8, 0.1], 0)
    assert all(map(torch.equal, made, given))


def test_the_copy_into_a_reduction() -> None:
    tensors = [random(10, 33).bfloat16(), random(7).bfloat16(), random(8, 3, 2).bfloat16()]
    chunks = [-(-len(each) // 4) * each[0].numel() for each in tensors]
    found, expected = torch.empty(2, 4, sum(chunks))
    offset = 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        unit_copies_triton.copy_in(tensor, found, chunk, offset)
        offset += chunk
    torch._chunk_cat(tensors, 0, 4, out=expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_the_copy_out_of_a_gather(dtype: torch.dtype) -> None:
    sizes = [3000, 7, 64]
    gathered = (100 * random(4, sum(sizes))).abs().to(dtype)
    found = [torch.zeros(4, size, dtype=dtype) for size in sizes]
    start = 0
    for tensor, size in zip(found, sizes, strict=True):
        unit_copies_triton.copy_out(gathered, tensor, size, start)
        start += size
    assert all(map(torch.equal, found, gathered.split(sizes, dim=1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_floats_of_nf4(dtype: torch.dtype) -> None:
    """Not in bf16, which the interpreter cuts off and a GPU rounds."""
    # Less than a piece of a row, and one and a half.
    for shape in ((2, 3, 64), (3, 3072)):
        packed = nf4.pack(random(*shape))
        assert torch.equal(nf4_triton.floats_of(packed, dtype), nf4.floats_of(packed, dtype))


def test_floats_of_mxfp4() -> None:
    """Every byte and every scale, in rows shorter than a piece and longer than one."""
    generator = torch.Generator().manual_seed(0)
    for groups in (2, 160):
        blocks = torch.randint(0, 256, (2, 3, groups, 16), generator=generator).byte()
        scales = torch.arange(6 * groups).view(2, 3, groups).byte()
        if groups == 2:
            scales.view(-1)[:4] = torch.tensor([0, 1, 252, 255])
        packed = mxfp4.join(blocks, scales).view(torch.int32)
        found = mxfp4_triton.floats_of(packed, torch.float32)
        expected = mxfp4.floats_of(packed, torch.float32)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_floats_of_fp8_blocks() -> None:
    """Every code, and a last block that is cut off."""
    for width in (200, 2304):
        values = torch.arange(3 * width).view(3, width).byte().view(float8.FORWARD)
        scales = random(3, -(-width // 128)).abs()
        packed = fp8_blocks.join(values, scales).view(torch.int64)
        for dtype in (torch.float16, torch.float32):
            found = fp8_blocks_triton.floats_of(packed, dtype)
            expected = fp8_blocks.floats_of(packed, dtype)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_rows_of_float8() -> None:
    """Less than a piece of a row and more than one, rows of all magnitudes, and every code."""
    for shape in ((2, 3, 32), (3, 2304)):
        packed = float8_rows.pack(random(*shape) * 1e-3)
        packed[..., :32] = torch.arange(-128, -96).to(torch.int8)
        packed[-1, ..., :32] = torch.arange(96, 128).to(torch.int8)
        assert torch.equal(float8_rows_triton.steps_of(packed), float8_rows.steps_of(packed))
        for dtype in (torch.float16, torch.float32):
            found = float8_rows_triton.floats_of(packed, dtype)
            expected = float8_rows.floats_of(packed, dtype)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_backward_makes_of_rows_of_float8(shape: tuple[int, int]) -> None:
    height, width = shape
    packed = float8_rows.pack(random(height, width) * torch.logspace(-3, 3, height)[:, None])
    codes = float8_rows.codes_of(packed).view(torch.uint8)
    assert torch.equal(float8_rows_triton.turned(packed).view(torch.uint8), codes.t())
    grad, steps = random(50, height, seed=1).bfloat16(), float8_rows.steps_of(packed)
    (found, by), (expected, factor) = (
        room.cast_columns(grad, steps) for room in (float8_rows_triton, float8_rows)
    )
    assert torch.equal(by, factor)
    one, other = found.float(), expected.float()
    # As above, the interpreter rounds otherwise at powers of two and below normal numbers.
    least = torch.finfo(float8.BACKWARD).smallest_normal
    assert ((one - other).abs() <= other.abs() / 2 + least).all()
    assert (one == other).float().mean() > 0.9


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gates_and_their_backward(shape: tuple[int, int], activation: str) -> None:
    gate, up, grad = (random(*shape, seed=seed) for seed in range(3))
    product, grads = gated(gate, up, activation), gated_grads(gate, up, grad, activation)
    factors = ACTIVATIONS[activation]
    made = swiglu_triton.product(gate, up, *factors)
    torch.testing.assert_close(made, product, rtol=1e-5, atol=1e-6)
    found = swiglu_triton.gated_backward(gate, up, grad, *factors)
    for one, other in zip((grad, *found), (*grads, product), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab", [100, 16384, 20000])
@pytest.mark.parametrize(
    "form",
    [PLAIN, HeadForm(scale=-0.3), HeadForm(cap=4.0), HeadForm(hidden_scale=2, scale=3, cap=7.0)],
)
def test_logits_that_become_their_gradient(vocab: int, form: HeadForm) -> None:
    # There is room between the rows, which nothing may read or write.
    whole = 5 * random(4, vocab + 3)
    whole[:, vocab:] = 1e9
    ours = whole[:, :vocab]
    plain, labels = ours.clone(), torch.tensor([3, IGNORE_INDEX, vocab - 1, 0])
    losses = cross_entropy_triton.turn(ours, labels, IGNORE_INDEX, form)
    torch.testing.assert_close(losses.sum(), turn_into_gradient(plain, labels, form))
    # Where a cap is reached, one minus the square of a number next to one is left.
    atol = 1e-7 if form.cap is None else 2e-7 * form.logit_scale
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=atol)
    assert losses[1] == 0 and not ours[1].any()
    assert torch.all(whole[:, vocab:] == 1e9)


def test_a_loss_that_is_not_finite_shows() -> None:
    logits = random(3, 100)
    logits[0, 7], logits[1, 8] = float("nan"), float("inf")
    losses = cross_entropy_triton.turn(logits, torch.tensor([3, 4, 5]), IGNORE_INDEX)
    assert losses.isfinite().tolist() == [False, False, True]
    assert logits.isfinite().all(dim=1).tolist() == [False, False, True]


def test_casts_of_experts() -> None:
    """Rows longer than a block, an expert without a row, and one with more than a tile of them."""
    ends = torch.tensor([5, 5, 90, 91], dtype=torch.int32)
    places = float8_experts.spread_ends(ends)
    room = float8_experts.room_for(91, len(ends))
    rows = random(91, 80) * torch.logspace(-3, 3, 91)[:, None]
    stack, long = random(3, 70, 80).bfloat16(), random(3, 2304)
    of_groups = float8_experts_triton.cast_grouped_columns(rows, ends, places, room)
    for found, expected in (
        (float8_experts_triton.cast_rows(long), float8_experts.cast_rows(long)),
        (float8_experts_triton.cast_turned(stack), float8_experts.cast_turned(stack)),
        (of_groups, float8_experts.cast_grouped_columns(rows, ends, places)),
    ):
        assert found[0].shape == expected[0].shape
        known = slice(int(places[-1])) if found is of_groups else slice(None)
        one, other = found[0].float()[..., known], expected[0].float()[..., known]
        # As for other casts, the interpreter rounds otherwise at powers of two.
        least = torch.finfo(float8.FORWARD).smallest_normal
        assert ((one - other).abs() <= other.abs() / 2 + least).all()
        assert (one == other).float().mean() > 0.9
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("amax_of", ()),
        ("cast", (torch.tensor(30.0), float8.FORWARD)),
        ("cast", (torch.tensor(30.0), float8.BACKWARD)),
        ("cast_both", (torch.tensor(30.0), float8.FORWARD)),
        ("cast_both", (torch.tensor(30.0), float8.BACKWARD)),
        ("swiglu_amax", ()),
        ("swiglu_cast", (torch.tensor(30.0),)),
        ("swiglu_grad_amax", ()),
        ("swiglu_grad_cast", (torch.tensor([100.0, 90.0, 50.0]),)),
    ],
)
def test_casts(name: str, others: tuple[Any, ...], shape: tuple[int, int]) -> None:
    takes = 3 if "grad" in name else 2 if "swiglu" in name else 1
    given = [random(*shape, seed=seed).bfloat16() for seed in range(takes)]
    found, expected = (getattr(room, name)(*given, *others) for room in (float8_triton, float8))
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        dtype, one, other = other.dtype, one.float(), other.float()
        if dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
            continue
        # Where rounding up arrives at a power of two, the interpreter gives half of it, and it cuts
        # off below the smallest normal number.
        least = torch.finfo(dtype).smallest_normal
        assert ((one - other).abs() <= other.abs() / 2 + least).all()
        assert (one == other).float().mean() > 0.9


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -300.0])
def test_the_largest_of_numbers_that_are_out_of_the_ordinary(value: float) -> None:
    gate, up, grad = (random(70, 130, seed=seed).bfloat16() for seed in range(3))
    gate[3, 5] = value
    for name, given in (
        ("amax_of", (gate,)),
        ("swiglu_amax", (gate, up)),
        ("swiglu_grad_amax", (gate, up, grad)),
    ):
        found, expected = (getattr(room, name)(*given) for room in (float8_triton, float8))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


COMPILED = """\
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shardwise.kernels.float8_triton import _swiglu_grad_cast as kernel

types = {"gate": "*bf16", "up": "*bf16", "grad": "*bf16", "scales": "*fp32", "height": "i32",
         "width": "i32", "ROWS": "constexpr", "COLUMNS": "constexpr"}
source = ASTSource(kernel, {name: types.get(name, "*u8") for name in kernel.arg_names},
                   {"ROWS": 32, "COLUMNS": 128})
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(made.asm["ptx"].count("e5m2x2"))

from shardwise.kernels.float8_experts_triton import _cast_columns as kernel

types = {"x": "*bf16", "ends": "*i32", "places": "*i32", "codes": "*u8", "steps": "*fp32",
         "GROUPED": "constexpr", "ROWS": "constexpr", "COLUMNS": "constexpr"}
source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names},
                   {"GROUPED": True, "ROWS": 64, "COLUMNS": 64})
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(made.asm["ptx"].count("e4m3x2"))
"""


def test_rows_and_columns_are_cast_by_instructions_of_their_own() -> None:
    """Shared ones came out of CUDA's assembler wrong on an H200, one byte in four."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Two gradients of 32 x 128 numbers, by two for each of 256 threads, for rows and for columns.
    gradients, experts_columns = map(int, done.stdout.split())
    assert gradients == 2 * (32 * 128 // 256 // 2) * 2
    # 64 x 64 numbers, by two for each of 128 threads.
    assert experts_columns == 64 * 64 // 128 // 2


def test_rows_of_experts_are_summed() -> None:
    rows, places = random(24, 1100), torch.randperm(24).view(8, 3)
    found = experts_triton.sum_rows(rows, places)
    torch.testing.assert_close(found, experts.sum_rows(rows, places))


@pytest.mark.parametrize("width", [16, 1100])
def test_weighted_swiglu(width: int) -> None:
    halves, weights, grad = random(6, 2 * width), random(6, seed=1), random(6, width, seed=2)
    found = experts_triton.weighted_swiglu(halves, weights)
    torch.testing.assert_close(found, experts.weighted_swiglu(halves, weights))
    for one, other in zip(
        experts_triton.weighted_swiglu_backward(grad, halves, weights),
        experts.weighted_swiglu_backward(grad, halves, weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# Experts of 70 rows: none of the first, one row, two tiles, none, and the rest.
ENDS = torch.tensor([0, 1, 65, 65, 70], dtype=torch.int32)


@pytest.mark.parametrize("width", [16, 300])
@pytest.mark.parametrize("weights", [None, random(70, seed=1)])
def test_rows_are_summed_by_expert(width: int, weights: Tensor | None) -> None:
    rows = random(70, width)
    found = experts_triton.sum_by_expert(rows, ENDS, weights)
    expected = experts.sum_by_expert(rows, ENDS, weights)
    assert not found[0].any() and not found[3].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_experts_are_summed_with_their_biases() -> None:
    rows, places, bias = random(24, 1100), torch.randperm(24).view(8, 3), random(5, 1100, seed=1)
    others = bias, torch.arange(24).view(8, 3) % 5, random(8, 3, seed=2)
    found = experts_triton.sum_biased_rows(rows, places, *others)
    torch.testing.assert_close(found, experts.sum_biased_rows(rows, places, *others))


@pytest.mark.parametrize("width", [16, 1100])
@pytest.mark.parametrize("narrow", [torch.uint8, torch.int16])
def test_weighted_clamped_swiglu(width: int, narrow: torch.dtype) -> None:
    pairs, weights, grad = random(6, 2 * width), random(6, seed=1), random(6, width, seed=2)
    bias, rows = random(4, 2 * width, seed=3), torch.tensor([0, 0, 1, 1, 3, 3], dtype=narrow)
    pairs[2, 5] = float("nan")
    given = pairs, weights, bias, rows, 1.702, 1.0
    found, expected = (
        (
            room.weighted_clamped_swiglu(*given),
            *room.weighted_clamped_swiglu_backward(grad, *given),
        )
        for room in (clamped_swiglu_triton, clamped_swiglu)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    # Limits are passed on either side, and what is no number stays in sight.
    assert 0.1 < (found[1] == 0).float().mean() < 0.9
    assert found[0].isnan().sum() == 1
