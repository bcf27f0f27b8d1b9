"""Causal attention as an operator: FlashAttention 4 on a GPU, plain torch on a CPU.

Tensors are (sequences, length, heads, width). Heads of keys and values may be fewer than those of
queries; each then serves a group of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("shardwise::causal_attention", mutates_args=(), device_types="cpu")
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each token's attention over the tokens before it, and the logsumexp of its scores.

    Backward needs the logsumexp. `starts` keeps documents apart: it holds the first token of each
    document and then the number of tokens, and all sequences are one row.
    """
    scores = _scores(query, key, scale, starts)
    sums = scores.logsumexp(-1)
    mixed = (scores - sums[..., None]).exp() @ _by_head(value, query)
    sums = sums if starts is None else sums.transpose(0, 1).flatten(1)
    return mixed.transpose(1, 2).to(query.dtype).contiguous(), sums


@custom_op("shardwise::causal_attention_grad", mutates_args=(), device_types="cpu")
def causal_attention_grad(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    if starts is not None:
        sums = sums.unflatten(1, (len(query), -1)).transpose(0, 1)
    weights = (_scores(query, key, scale, starts) - sums[..., None]).exp()
    d_out = grad.transpose(1, 2).float()
    d_weights = d_out @ _by_head(value, query).mT
    meant = (d_out * out.transpose(1, 2).float()).sum(-1, keepdim=True)
    d_scores = scale * weights * (d_weights - meant)
    d_query = (d_scores @ _by_head(key, query)).transpose(1, 2)
    d_key = d_scores.mT @ query.transpose(1, 2).float()
    d_value = weights.mT @ d_out
    return _like(d_query, query), _grouped(d_key, key), _grouped(d_value, value)


def _by_head(side: Tensor, query: Tensor) -> Tensor:
    """Keys or values as (sequences, heads of the query, length, width)."""
    return side.float().repeat_interleave(query.shape[2] // side.shape[2], dim=2).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, scale: float, starts: Tensor | None) -> Tensor:
    scores = scale * query.transpose(1, 2).float() @ _by_head(key, query).mT
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if starts is not None:
        tokens = torch.arange(query.shape[0] * query.shape[1], dtype=starts.dtype)
        documents = torch.searchsorted(starts, tokens, right=True).view(len(query), 1, -1)
        unseen = unseen | (documents[..., None] != documents[..., None, :])
    return scores.masked_fill(unseen, float("-inf"))


def _grouped(gradient: Tensor, side: Tensor) -> Tensor:
    """Sum the gradients over the query heads that share one key or value head."""
    groups = gradient.unflatten(1, (side.shape[2], -1)).sum(2)
    return _like(groups.transpose(1, 2), side)


def _like(values: Tensor, model: Tensor) -> Tensor:
    return torch.empty_like(model).copy_(values)


# ---- what autograd and the compiler must know -----------------------------------------------


@causal_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _ = query.shape
    shape = (sequences, heads, length) if starts is None else (heads, sequences * length)
    sums = query.new_empty(shape, dtype=torch.float32)
    return query.new_empty(sequences, length, heads, value.shape[-1]), sums


@causal_attention_grad.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, starts = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, starts = ctx.saved_tensors
    return (*causal_attention_grad(grad, *tensors, ctx.scale, starts), None, None)


causal_attention.register_autograd(_backward, setup_context=_remember)


# ---- on a GPU ---------------------------------------------------------------------------------

# torch calls these private functions for its own FlashAttention 4. No public function runs backward
# by itself. Later releases return more results than are read here.


def has_flash_attention() -> bool:
    """Whether FlashAttention 4 is installed. Older versions are packages of the same name."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@causal_attention.register_kernel("cuda")
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import interface

    sides = (_in_a_row(side, starts) for side in (query, key, value))
    out, sums, *_ = interface._flash_attn_fwd(
        *sides, return_lse=True, **_how(scale, starts, query.shape[1])
    )
    return out.view(*query.shape[:3], -1), sums


@causal_attention_grad.register_kernel("cuda")
def _(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute import interface

    query, key, value, out, sums, scale, starts = given
    sides = (_in_a_row(side, starts) for side in (query, key, value, out, grad))
    d_query, d_key, d_value, *_ = interface._flash_attn_bwd(
        *sides, sums, **_how(scale, starts, query.shape[1])
    )
    return d_query.view(query.shape), d_key.view(key.shape), d_value.view(value.shape)


def _in_a_row(side: Tensor, starts: Tensor | None) -> Tensor:
    return side if starts is None else side.flatten(0, 1)


def _how(scale: float, starts: Tensor | None, length: int) -> dict[str, Any]:
    how: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    if starts is None:
        return how
    documents = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return {**how, **documents, "max_seqlen_q": length, "max_seqlen_k": length}
