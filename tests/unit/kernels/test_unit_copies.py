"""A unit's copies: torch's numbers, and that FSDP2 still calls the operators they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.internals.fsdp2 import replace_copy
from shardwise.kernels import unit_copies
from shardwise.kernels.unit_copies import chunk_cat, split_with_sizes_copy

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
# Rows that divide and rows that do not, fewer rows than ranks, a vector, more than one block.
SHAPES = [(16, 5), (13, 7), (3, 4), (11,), (64, 300), (6, 2, 3)]


def gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def room(tensors: list[Tensor], world: int, dtype: torch.dtype) -> Tensor:
    width = sum(-(-tensor.shape[0] // world) * tensor[0].numel() for tensor in tensors)
    return torch.full((world, width), float("nan"), dtype=dtype, device=tensors[0].device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_its_rows(device: str, world: int, dtype: torch.dtype) -> None:
    tensors = gradients(device, torch.bfloat16)
    found, expected = room(tensors, world, dtype), room(tensors, world, dtype)
    chunk_cat(tensors, 0, world, out=found)
    torch._chunk_cat(tensors, 0, world, out=expected)
    assert torch.equal(found, expected)


@NEEDS_GPU
@pytest.mark.parametrize("most", [0, 2**23])
def test_few_numbers_and_many_are_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(unit_copies, "_FEW", most)
    tensors = gradients("cuda", torch.bfloat16)
    found, expected = room(tensors, 1, torch.float32), room(tensors, 1, torch.float32)
    chunk_cat(tensors, 0, 1, out=found)
    torch._chunk_cat(tensors, 0, 1, out=expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_in_another_order_is_copied_by_torch(device: str) -> None:
    tensors = [torch.randn(6, 8, device=device).t(), torch.randn(5, device=device)]
    found, expected = room(tensors, 2, torch.float32), room(tensors, 2, torch.float32)
    chunk_cat(tensors, 0, 2, out=found)
    torch._chunk_cat(tensors, 0, 2, out=expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_parameter_gets_its_shards(device: str, dtype: torch.dtype) -> None:
    sizes = [64, 3, 5000, 16]
    gathered = torch.randint(0, 200, (4, sum(sizes)), device=device).to(dtype)
    found = [torch.zeros(4, size, dtype=dtype, device=device) for size in sizes]
    split_with_sizes_copy(gathered, sizes, 1, out=found)
    assert all(map(torch.equal, found, gathered.split(sizes, dim=1)))


@NEEDS_GPU
def test_fsdp2s_operators_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels import unit_copies_triton

    launched: list[str] = []
    for name in ("copy_in", "copy_out"):
        launch = getattr(unit_copies_triton, name)
        monkeypatch.setattr(
            unit_copies_triton,
            name,
            lambda *given, name=name, launch=launch: launched.append(name) or launch(*given),
        )
    replace_copy("chunk_cat", chunk_cat, "cuda")
    replace_copy("split_with_sizes_copy", split_with_sizes_copy, "cuda")
    tensors = gradients("cuda", torch.bfloat16)
    taken = room(tensors, 4, torch.float32)
    torch.ops.fsdp.chunk_cat(tensors, 0, 4, out=taken)
    sizes = [taken.shape[1] - 3, 3]
    out = [torch.empty(4, size, device="cuda") for size in sizes]
    torch.ops.fsdp.split_with_sizes_copy(taken, sizes, dim=1, out=out)
    assert launched == ["copy_in"] * len(SHAPES) + ["copy_out"] * 2
    assert torch.equal(torch.cat(out, dim=1), taken)
