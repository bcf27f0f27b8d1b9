"""Causal attention as an operator: FlashAttention 4 on a GPU, plain torch on a CPU. It knows
windows, soft caps and sinks.

Tensors are (sequences, length, heads, width). Heads of keys and values may be fewer than those of
queries; each then serves a group of them. There may be more keys than queries: both end with the
same token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("shardwise::causal_attention", mutates_args=(), device_types="cpu")
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's attention over the tokens before it, and the logsumexp of its scores.

    Backward needs the logsumexp. `starts` keeps documents apart: it holds the first token of each
    document and then the number of tokens, and all sequences are one row. A token sees the last
    `window` tokens, itself among them. `softcap` bounds scores by a tanh. `sinks` is one more
    score for each head, whose weight goes to no token. Where a document has more keys than queries,
    `key_starts` says where its keys begin.
    """
    scores = _scores(query, key, scale, (starts, key_starts), window, softcap)
    sums = scores.logsumexp(-1)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.float()[:, None])
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
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks. The last is empty where there are no sinks."""
    if starts is not None:
        sums = sums.unflatten(1, (len(query), -1)).transpose(0, 1)
    scores = _scores(query, key, scale, (starts, key_starts), window, softcap)
    weights = (scores - sums[..., None]).exp()
    d_out = grad.transpose(1, 2).float()
    d_weights = d_out @ _by_head(value, query).mT
    meant = (d_out * out.transpose(1, 2).float()).sum(-1, keepdim=True)
    d_scores = scale * weights * (d_weights - meant)
    if softcap is not None:
        # Scores that are not seen are infinite, and their weights are zero.
        d_scores = d_scores * (1 - (scores.clamp(min=-softcap) / softcap) ** 2)
    d_query = (d_scores @ _by_head(key, query)).transpose(1, 2)
    d_key = d_scores.mT @ query.transpose(1, 2).float()
    d_value = weights.mT @ d_out
    d_sinks = query.new_empty(0)
    if sinks is not None:
        lost = (sinks.float()[:, None] - sums).exp()
        d_sinks = -(lost * meant[..., 0]).sum((0, 2)).to(sinks.dtype)
    return _like(d_query, query), _grouped(d_key, key), _grouped(d_value, value), d_sinks


def _by_head(side: Tensor, query: Tensor) -> Tensor:
    """Keys or values as (sequences, heads of the query, length, width)."""
    return side.float().repeat_interleave(query.shape[2] // side.shape[2], dim=2).transpose(1, 2)


def _scores(
    query: Tensor,
    key: Tensor,
    scale: float,
    bounds: tuple[Tensor | None, Tensor | None],
    window: int | None,
    softcap: float | None,
) -> Tensor:
    scores = scale * query.transpose(1, 2).float() @ _by_head(key, query).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    starts, key_starts = bounds
    rows, documents = _places(query, starts)
    columns, key_documents = _places(key, starts if key_starts is None else key_starts)
    ago = columns[:, None] - rows[..., None]
    unseen = (ago < 0) | (documents[..., None] != key_documents[:, None])
    if window is not None:
        unseen = unseen | (ago >= window)
    return scores.masked_fill(unseen[:, None], float("-inf"))


def _places(side: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each token of each sequence: how far its document's end is, and the document's number."""
    sequences, length = side.shape[:2]
    if starts is None:
        starts = torch.arange(0, (sequences + 1) * length, length)
    tokens = torch.arange(sequences * length, dtype=starts.dtype)
    numbers = torch.searchsorted(starts, tokens, right=True)
    return (starts[numbers] - tokens).view(sequences, -1), numbers.view(sequences, -1)


def _grouped(gradient: Tensor, side: Tensor) -> Tensor:
    """Sum the gradients over the query heads that share one key or value head."""
    groups = gradient.unflatten(1, (side.shape[2], -1)).sum(2)
    return _like(groups.transpose(1, 2), side)


def _like(values: Tensor, model: Tensor) -> Tensor:
    return torch.empty_like(model).copy_(values)


# ---- what autograd and the compiler must know -----------------------------------------------


@causal_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    starts: Tensor | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _ = query.shape
    shape = (sequences, heads, length) if starts is None else (heads, sequences * length)
    sums = query.new_empty(shape, dtype=torch.float32)
    return query.new_empty(sequences, length, heads, value.shape[-1]), sums


@causal_attention_grad.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, sinks, _ = others
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), d_sinks


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, starts, ctx.window, ctx.softcap, sinks, key_starts = inputs
    ctx.save_for_backward(query, key, value, *output, starts, sinks, key_starts)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, starts, sinks, key_starts = ctx.saved_tensors
    how = (ctx.scale, starts, ctx.window, ctx.softcap, sinks, key_starts)
    *grads, d_sinks = causal_attention_grad(grad, *tensors, *how)
    return (*grads, None, None, None, None, None if sinks is None else d_sinks, None)


causal_attention.register_autograd(_backward, setup_context=_remember)


# ---- on a GPU ---------------------------------------------------------------------------------

# torch calls these private functions for its own FlashAttention 4. No public function runs backward
# by itself. Later releases return more results than are read here.


@causal_attention.register_kernel("cuda")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    starts: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import interface

    sides = (_in_a_row(side, starts) for side in (query, key, value))
    how = _how(scale, window, softcap, sinks) | _apart(query, key, starts, key_starts)
    out, sums, *_ = interface._flash_attn_fwd(*sides, return_lse=True, **how)
    return out.view(*query.shape[:3], -1), sums


@causal_attention_grad.register_kernel("cuda")
def _(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from flash_attn.cute import interface

    query, key, value, out, sums, scale, starts, window, softcap, sinks, key_starts = given
    sides = (_in_a_row(side, starts) for side in (query, key, value, out, grad))
    how = _how(scale, window, softcap, sinks) | _apart(query, key, starts, key_starts)
    d_query, d_key, d_value, *rest = interface._flash_attn_bwd(*sides, sums, **how)
    d_sinks = query.new_empty(0) if sinks is None else rest[0]
    return d_query.view(query.shape), d_key.view(key.shape), d_value.view(value.shape), d_sinks


def _in_a_row(side: Tensor, starts: Tensor | None) -> Tensor:
    return side if starts is None else side.flatten(0, 1)


def _how(
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> dict[str, Any]:
    """The same arguments by FlashAttention's names. Its window does not count the token itself."""
    how: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    if window is not None:
        how |= {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    if softcap is not None:
        how["softcap"] = softcap
    if sinks is not None:
        how["learnable_sink"] = sinks
    return how


def _apart(
    query: Tensor, key: Tensor, starts: Tensor | None, key_starts: Tensor | None
) -> dict[str, Any]:
    """Where documents begin, by FlashAttention's names."""
    if starts is None:
        return {}
    of_keys = starts if key_starts is None else key_starts
    lengths = {"max_seqlen_q": query.shape[1], "max_seqlen_k": key.shape[1]}
    return {"cu_seqlens_q": starts, "cu_seqlens_k": of_keys, **lengths}
