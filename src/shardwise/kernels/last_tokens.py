"""Attention of the last tokens of sequences over all of their tokens, as an operator.

cuDNN's kernels are about twice as fast on Hopper as torch's flash kernel, but their causal mask
begins at the first key. So the keys are taken in two parts: those before the first query, which
every query sees, and those of the queries themselves. Each part has a logsumexp of its scores, by
which the results are mixed. Backward computes each part again from the whole result.

Tensors are (sequences, length, heads, width). Heads of keys and values may be fewer than those of
queries; each then serves a group of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

_ATEN = torch.ops.aten
_WIDEST, _STEP = 128, 8


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels below know such tensors."""
    width = query.shape[-1]
    is_narrow = query.itemsize == 2 or not query.is_cuda
    return is_narrow and width == value.shape[-1] <= _WIDEST and width % _STEP == 0


@custom_op("shardwise::last_tokens_attention", mutates_args=())
def last_tokens_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Each token's attention over the tokens up to itself, and the logsumexp of its scores.

    The last query is the token of the last key, and there are more keys than queries.
    """
    query, key, value = _by_head(query, key, value)
    first = key.shape[2] - query.shape[2]
    early, early_sums = _part(query, key[:, :, :first], value[:, :, :first], scale, causal=False)
    late, late_sums = _part(query, key[:, :, first:], value[:, :, first:], scale, causal=True)
    sums = torch.logaddexp(early_sums, late_sums).contiguous()
    mixed = early * (early_sums - sums).exp() + late * (late_sums - sums).exp()
    return mixed.to(query.dtype).transpose(1, 2).contiguous(), sums


@custom_op("shardwise::last_tokens_attention_grad", mutates_args=())
def last_tokens_attention_grad(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    grad, query, key, value, out = _by_head(grad, query, key, value, out)
    first = key.shape[2] - query.shape[2]
    early_sides = query, key[:, :, :first], value[:, :, :first]
    late_sides = query, key[:, :, first:], value[:, :, first:]
    d_early, *early = _part_grad(grad, early_sides, out, sums, scale, causal=False)
    d_late, *late = _part_grad(grad, late_sides, out, sums, scale, causal=True)
    d_query = (d_early.float() + d_late.float()).to(query.dtype)
    parts = zip(_by_head(*early), _by_head(*late), strict=True)
    d_key, d_value = (torch.cat(both, 1).contiguous() for both in parts)
    return d_query.transpose(1, 2).contiguous(), d_key, d_value


def _by_head(*sides: Tensor) -> tuple[Tensor, ...]:
    """Heads and tokens swapped."""
    return tuple(side.transpose(1, 2) for side in sides)


def _part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The attention over some of the keys, and the logsumexp of its scores with a last dim of 1."""
    if query.is_cuda:
        out, sums, *_ = _ATEN._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, sums.view(*query.shape[:3], 1)
    sides = (_for_each(side, query) for side in (key, value))
    out, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, *sides, 0.0, causal, scale=scale
    )
    return out, sums[..., None]


def _part_grad(
    grad: Tensor,
    sides: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, ...]:
    """The gradients of one part. `out` and `sums` are those of all keys, so each score has its
    final weight."""
    query, key, value = sides
    if query.is_cuda:
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        lengths = query.shape[2], key.shape[2]
        given = grad, query, key, value, out, sums, nothing, nothing, None, None, None, *lengths
        return tuple(
            _ATEN._scaled_dot_product_cudnn_attention_backward(*given, 0.0, causal, scale=scale)
        )
    each_key, each_value = (_for_each(side, query) for side in (key, value))
    d_query, *d_sides = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, each_key, each_value, out, sums[..., 0], 0.0, causal, scale=scale
    )
    return d_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in d_sides)


def _for_each(side: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the query: a CPU's kernel knows no groups."""
    return side.repeat_interleave(query.shape[1] // side.shape[1], dim=1)


# ---- what autograd and the compiler must know -----------------------------------------------


@last_tokens_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _ = query.shape
    sums = query.new_empty(sequences, heads, length, 1, dtype=torch.float32)
    return query.new_empty(query.shape), sums


@last_tokens_attention_grad.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *sides, ctx.scale = inputs
    ctx.save_for_backward(*sides, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *last_tokens_attention_grad(grad, *ctx.saved_tensors, ctx.scale), None


last_tokens_attention.register_autograd(_backward, setup_context=_remember)
