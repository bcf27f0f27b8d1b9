"""The copy into a reduction: torch's numbers, and that FSDP2 still calls the operator it is for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp  # defines the operator
from torch import Tensor

from shardwise.kernels.chunk_cat import chunk_cat, take_over

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


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_in_another_order_is_copied_by_torch(device: str) -> None:
    tensors = [torch.randn(6, 8, device=device).t(), torch.randn(5, device=device)]
    found, expected = room(tensors, 2, torch.float32), room(tensors, 2, torch.float32)
    chunk_cat(tensors, 0, 2, out=found)
    torch._chunk_cat(tensors, 0, 2, out=expected)
    assert torch.equal(found, expected)


def test_the_operator_is_still_fsdp2s() -> None:
    schema = str(torch.ops.fsdp.chunk_cat.default._schema)
    assert "chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()" in schema


@NEEDS_GPU
def test_fsdp2s_operator_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.kernels import chunk_cat_triton

    launched: list[int] = []
    launch = chunk_cat_triton.launch
    monkeypatch.setattr(
        chunk_cat_triton, "launch", lambda *given: launched.append(1) or launch(*given)
    )
    take_over()
    tensors = gradients("cuda", torch.bfloat16)
    torch.ops.fsdp.chunk_cat(tensors, 0, 4, out=room(tensors, 4, torch.float32))
    assert len(launched) == len(SHAPES)
