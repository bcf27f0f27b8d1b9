"""Causal attention as an operator, against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

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


def step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as transformers' `eager` computes it."""
    groups = query.shape[2] // key.shape[2]
    key, value = (side.repeat_interleave(groups, dim=2) for side in (key, value))
    scores = SCALE * torch.einsum("bqhd,bkhd->bhqk", query, key)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(query.shape[1], device=query.device)
    ago = place[:, None] - place[None]
    unseen = (ago < 0) | (ago >= (window or len(place)))
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(place)]
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "window of one": {"window": 1},
    "cap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 1.5, "sinks": True},
}


def with_sinks(kind: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """The same with a tensor of sinks, one for each head of `like`."""
    if "sinks" not in kind:
        return kind
    sinks = torch.linspace(-1, 1, like.shape[2]).to(like.device, like.dtype)
    return {**kind, "sinks": sinks.requires_grad_()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_windows_caps_and_sinks_are_as_step_by_step(kind: dict[str, Any], kv_heads: int) -> None:
    given = sides("cpu", torch.float32, length=33, heads=4, kv_heads=kv_heads, width=8)
    kind = with_sinks(kind, given[0])
    learns = [*given, *filter(torch.is_tensor, kind.values())]
    assert_same(causal_attention(*given, SCALE, **kind)[0], step_by_step(*given, **kind), learns)


def test_a_window_ends_where_its_document_begins() -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    apart = documents_apart(partial(step_by_step, window=3), given)
    assert_same(causal_attention(*given, SCALE, STARTS, 3)[0], apart, given)


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
    sinks = torch.zeros(4, requires_grad=True)
    for how in ((starts,), (starts, 3, 1.5, sinks)):
        torch.library.opcheck(causal_attention, (*given, SCALE, *how), test_utils=tests)
    out, sums = causal_attention(*given, SCALE, starts)
    tensors = [side.detach() for side in (torch.randn_like(out), *given, out, sums)]
    grad_op = torch.ops.shardwise.causal_attention_grad
    tests = ("test_schema", "test_faketensor")
    for how in ((None, None, None), (3, 1.5, sinks.detach())):
        torch.library.opcheck(grad_op, (*tensors, SCALE, starts, *how, None), test_utils=tests)


def documents_apart(attend: Attend, given: list[Tensor]) -> Tensor:
    """Each document by itself."""
    rows = [[side.flatten(0, 1)[None, a:b] for side in given] for a, b in pairwise(BOUNDS)]
    return torch.cat([attend(*row)[0] for row in rows]).view(given[0].shape)


def test_documents_are_as_if_each_were_alone() -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    ours = causal_attention(*given, SCALE, STARTS)[0]
    assert_same(ours, documents_apart(of_torch, given), given)


# The second half of each sequence asks, and looks at all of it.
ASKED = slice(4, 9)
ASKED_STARTS = torch.tensor([0, 0, 1, 5, 8, 10, 10, 10], dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_fewer_queries_than_keys_are_the_last_ones(kind: dict[str, Any]) -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    kind = with_sinks(kind, given[0])
    learns = [*given, *filter(torch.is_tensor, kind.values())]
    query, key, value = given
    ours = causal_attention(query[:, ASKED], key, value, SCALE, **kind)[0]
    assert_same(ours, step_by_step(*given, **kind)[:, ASKED], learns)


@pytest.mark.parametrize("window", [None, 3])
def test_documents_that_begin_before_the_queries(window: int | None) -> None:
    given = sides("cpu", torch.float32, length=9, heads=4, kv_heads=2, width=8)
    query, key, value = given
    ours = causal_attention(
        query[:, ASKED], key, value, SCALE, ASKED_STARTS, window, key_starts=STARTS
    )[0]
    whole = causal_attention(*given, SCALE, STARTS, window)[0]
    assert_same(ours, whole[:, ASKED], given)


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
@pytest.mark.parametrize(
    "kind", [{"window": 200}, {"softcap": 5.0}, {"window": 128, "sinks": True}]
)
@pytest.mark.parametrize(("width", "kv_heads"), [(256, 4), (128, 2), (64, 8)])
def test_windows_caps_and_sinks_on_a_gpu(kind: dict[str, Any], width: int, kv_heads: int) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    given = sides("cuda", torch.bfloat16, length=515, heads=8, kv_heads=kv_heads, width=width)
    kind = with_sinks(kind, given[0])
    exact = [side.detach().float().requires_grad_() for side in given]
    ours = causal_attention(*given, SCALE, **kind)[0]
    if "sinks" in kind:
        sinks = kind["sinks"]
        kind = {**kind, "sinks": sinks.detach().float().requires_grad_()}
        given, exact = [*given, sinks], [*exact, kind["sinks"]]
    check(ours, step_by_step(*exact[:3], **kind), given, exact)


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
