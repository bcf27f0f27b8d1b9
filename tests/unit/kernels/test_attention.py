"""Causal attention as an operator, against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.attention import causal_attention

SCALE = 0.3
# Documents of two sequences of nine tokens; none crosses from one into the other.
BOUNDS = (0, 4, 5, 9, 16, 18)
STARTS = torch.tensor([*BOUNDS, 18, 18], dtype=torch.int32)
Attend = Callable[..., Tensor]


def sides(
    device: str, dtype: torch.dtype, *, length: int, heads: int, kv_heads: int, width: int
) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, length, count, width).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    turned = (side.transpose(1, 2) for side in (query, key, value))
    out = scaled_dot_product_attention(*turned, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 33])
def test_agrees_with_torch_on_a_cpu(length: int, kv_heads: int) -> None:
    given = sides("cpu", torch.float32, length=length, heads=4, kv_heads=kv_heads, width=8)
    assert_same(causal_attention(*given, SCALE)[0], of_torch(*given), given)


def assert_same(ours: Tensor, theirs: Tensor, given: list[Tensor]) -> None:
    """And so are the gradients of what both were made of."""
    grad = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, given, grad),
        torch.autograd.grad(theirs, given, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
def test_the_compiler_knows_the_operators(starts: Tensor | None) -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(causal_attention, (*given, SCALE, starts), test_utils=tests)
    out, sums = causal_attention(*given, SCALE, starts)
    tensors = [side.detach() for side in (torch.randn_like(out), *given, out, sums)]
    grad_op = torch.ops.shardwise.causal_attention_grad
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(grad_op, (*tensors, SCALE, starts), test_utils=tests)


def documents_apart(attend: Attend, given: list[Tensor]) -> Tensor:
    """Each document by itself."""
    rows = [[side.flatten(0, 1)[None, a:b] for side in given] for a, b in pairwise(BOUNDS)]
    return torch.cat([attend(*row)[0] for row in rows]).view(given[0].shape)


def test_documents_are_as_if_each_were_alone() -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    ours = causal_attention(*given, SCALE, STARTS)[0]
    assert_same(ours, documents_apart(of_torch, given), given)


ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="torch sees no GPU of Hopper or later: nothing here was tested",
)


@ON_HOPPER
@pytest.mark.parametrize(("width", "kv_heads"), [(128, 2), (64, 8)])
def test_agrees_with_torch_on_a_gpu(width: int, kv_heads: int) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    given = sides("cuda", torch.bfloat16, length=515, heads=8, kv_heads=kv_heads, width=width)
    exact = [side.detach().float().requires_grad_() for side in given]
    check(causal_attention(*given, SCALE)[0], of_torch(*exact), given, exact)


@ON_HOPPER
def test_documents_are_as_if_each_were_alone_on_a_gpu() -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    given = sides("cuda", torch.bfloat16, length=9, heads=8, kv_heads=2, width=128)
    exact = [side.detach().float().requires_grad_() for side in given]
    ours = causal_attention(*given, SCALE, STARTS.cuda())[0]
    check(ours, documents_apart(of_torch, exact), given, exact)


def check(ours: Tensor, theirs: Tensor, given: list[Tensor], exact: list[Tensor]) -> None:
    grad = torch.randn_like(ours)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, given, grad)),
        (theirs, *torch.autograd.grad(theirs, exact, grad.float())),
        strict=True,
    )
    for mine, other in pairs:
        assert (mine.float() - other).norm() <= 0.01 * other.norm()
