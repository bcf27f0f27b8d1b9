"""What surrounds the grouped matmuls of experts, as operators: rows dealt out and summed, and
SwiGLU. On a GPU all but the first are Triton kernels, on a CPU plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.swiglu import swiglu, swiglu_grads


@custom_op("shardwise::deal_rows", mutates_args=())
def deal_rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Row i of the result is row tokens[i] of `x`."""
    return x.index_select(0, tokens)


@custom_op("shardwise::sum_rows", mutates_args=(), device_types="cpu")
def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Row i of the result is the sum, in fp32, of the rows that places[i] lists."""
    return rows[places].sum(1, dtype=torch.float32).to(rows.dtype)


@custom_op("shardwise::sum_biased_rows", mutates_args=(), device_types="cpu")
def sum_biased_rows(
    rows: Tensor, places: Tensor, bias: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """The same, and the biases of the experts that experts[i] lists, times weights[i].

    Rows are weighted already.
    """
    biases = weights.float()[..., None] * bias[experts].float()
    return (rows[places].float() + biases).sum(1).to(rows.dtype)


@custom_op("shardwise::sum_by_expert", mutates_args=(), device_types="cpu")
def sum_by_expert(rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    """Row e of the result is the sum, in fp32, of the rows of expert e, which end at ends[e]. Each
    is multiplied by its weight."""
    row = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
    wide = rows.float() if weights is None else rows.float() * weights.float()[:, None]
    sums = wide.new_zeros(len(ends), rows.shape[1])
    return sums.index_add_(0, torch.searchsorted(ends, row, right=True), wide).to(rows.dtype)


@custom_op("shardwise::weighted_swiglu", mutates_args=(), device_types="cpu")
def weighted_swiglu(halves: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight, for rows that hold gate and then up."""
    gate, up = halves.chunk(2, dim=1)
    return (swiglu(gate, up) * weights.float()[:, None]).to(halves.dtype)


@custom_op("shardwise::weighted_swiglu_backward", mutates_args=(), device_types="cpu")
def weighted_swiglu_backward(
    grad: Tensor, halves: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both halves and of the weights, and silu(gate) * up * weight again."""
    gate, up = halves.chunk(2, dim=1)
    weight, product = weights.float()[:, None], swiglu(gate, up)
    both = torch.cat(swiglu_grads(gate, up, grad.float() * weight), dim=1)
    d_weights = (grad.float() * product).sum(1).to(weights.dtype)
    return both.to(halves.dtype), (product * weight).to(halves.dtype), d_weights


@deal_rows.register_fake
def _(x: Tensor, tokens: Tensor) -> Tensor:
    return x.new_empty(len(tokens), x.shape[1])


@sum_rows.register_fake
def _(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@sum_biased_rows.register_fake
def _(rows: Tensor, places: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@sum_by_expert.register_fake
def _(rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[1])


@weighted_swiglu.register_fake
def _(halves: Tensor, weights: Tensor) -> Tensor:
    return halves.new_empty(len(halves), halves.shape[1] // 2)


@weighted_swiglu_backward.register_fake
def _(grad: Tensor, halves: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(halves), torch.empty_like(grad), torch.empty_like(weights)


# This module imports Triton, which is missing where there is no GPU.


@sum_rows.register_kernel("cuda")
def _(rows: Tensor, places: Tensor) -> Tensor:
    from shardwise.kernels import experts_triton

    return experts_triton.sum_rows(rows, places)


@sum_biased_rows.register_kernel("cuda")
def _(rows: Tensor, places: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    from shardwise.kernels import experts_triton

    return experts_triton.sum_biased_rows(rows, places, bias, experts, weights)


@sum_by_expert.register_kernel("cuda")
def _(rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    from shardwise.kernels import experts_triton

    return experts_triton.sum_by_expert(rows, ends, weights)


@weighted_swiglu.register_kernel("cuda")
def _(halves: Tensor, weights: Tensor) -> Tensor:
    from shardwise.kernels import experts_triton

    return experts_triton.weighted_swiglu(halves, weights)


@weighted_swiglu_backward.register_kernel("cuda")
def _(grad: Tensor, halves: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from shardwise.kernels import experts_triton

    return experts_triton.weighted_swiglu_backward(grad, halves, weights)
