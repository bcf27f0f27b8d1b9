"""Attention of the last tokens of sequences, in two parts, beside a mask of all pairs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.last_tokens import last_tokens_attention, takes

SEQUENCES, LENGTH, LAST, WIDTH = 2, 24, 5, 16


def sides_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of the last tokens, and keys and values of all; views, as where ranks gather them."""
    torch.manual_seed(0)
    both = torch.randn(LENGTH, SEQUENCES, 2, 2 * WIDTH, dtype=dtype).transpose(0, 1)
    query = torch.randn(SEQUENCES, LAST, 4, WIDTH, dtype=dtype)
    return [each.requires_grad_() for each in (query, both[..., :WIDTH], both[..., WIDTH:])]


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_two_parts_are_what_a_mask_shows(dtype: torch.dtype, off: float) -> None:
    sides = sides_of(dtype)
    out, sums = last_tokens_attention(*sides, 0.3)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, sides, grad)
    wide = [side.detach().float().requires_grad_() for side in sides]
    query, key, value = (side.transpose(1, 2) for side in wide)
    key, value = (side.repeat_interleave(2, 1) for side in (key, value))
    seen = torch.ones(LAST, LENGTH, dtype=torch.bool).tril(LENGTH - LAST)
    exact = scaled_dot_product_attention(query, key, value, seen, scale=0.3).transpose(1, 2)
    scores = (0.3 * query @ key.mT).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(sums[..., 0], scores.logsumexp(-1), rtol=off, atol=off)
    wanted = torch.autograd.grad(exact, wide, grad.float())
    for one, other in zip((out, *found), (exact, *wanted), strict=True):
        assert ((one.float() - other).norm() / other.norm()).item() < off


def test_the_compiler_is_told_what_it_returns() -> None:
    torch.library.opcheck(last_tokens_attention, (*sides_of(torch.float32), 0.3))


def test_heads_that_the_kernels_do_not_know_are_left_to_others() -> None:
    query, _, value = sides_of(torch.bfloat16)
    assert takes(query, value)
    assert not takes(query, value[..., :8])
    assert not takes(query[..., :12], value[..., :12])
