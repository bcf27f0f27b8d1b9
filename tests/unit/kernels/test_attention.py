"""Causal attention as an operator, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.attention import causal_attention

SCALE = 0.3


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
def test_agrees_with_torch_on_a_processor(length: int, kv_heads: int) -> None:
    given = sides("cpu", torch.float64, length=length, heads=4, kv_heads=kv_heads, width=8)
    given = [side.detach().float().requires_grad_() for side in given]
    ours, theirs = causal_attention(*given, SCALE)[0], of_torch(*given)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, given, grad),
        torch.autograd.grad(theirs, given, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_the_compiler_knows_the_operators() -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(causal_attention, (*given, SCALE), test_utils=tests)
    out, sums = causal_attention(*given, SCALE)
    tensors = [side.detach() for side in (torch.randn_like(out), *given, out, sums)]
    grad_op = torch.ops.shardwise.causal_attention_grad
    torch.library.opcheck(grad_op, (*tensors, SCALE), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="torch sees no GPU of Hopper or later: nothing here was tested",
)
@pytest.mark.parametrize(("width", "kv_heads"), [(128, 2), (64, 8)])
def test_agrees_with_torch_on_a_gpu(width: int, kv_heads: int) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    given = sides("cuda", torch.bfloat16, length=515, heads=8, kv_heads=kv_heads, width=width)
    exact = [side.detach().float().requires_grad_() for side in given]
    ours, theirs = causal_attention(*given, SCALE)[0], of_torch(*exact)
    grad = torch.randn_like(ours)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, given, grad)),
        (theirs, *torch.autograd.grad(theirs, exact, grad.float())),
        strict=True,
    )
    for mine, other in pairs:
        assert (mine.float() - other).norm() <= 0.01 * other.norm()
