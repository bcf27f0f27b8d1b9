"""SwiGLU that is clamped, over gate and up in turn and a bias for each expert: as operators.

For each pair of gate and up, with their expert's bias, the result is
`gate * sigmoid(alpha * gate) * (up + 1)`, where gate is at most `limit`, and up is at most `limit`
in magnitude. On a GPU the operators are Triton kernels, on a CPU plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("shardwise::weighted_clamped_swiglu", mutates_args=(), device_types="cpu")
def weighted_clamped_swiglu(
    pairs: Tensor, weights: Tensor, bias: Tensor, experts: Tensor, alpha: float, limit: float
) -> Tensor:
    """The result times its row's weight, for rows that belong to `experts`."""
    product = clamped_swiglu(pairs.float() + bias[experts.int()].float(), alpha, limit)
    return (product * weights.float()[:, None]).to(pairs.dtype)


@custom_op("shardwise::weighted_clamped_swiglu_backward", mutates_args=(), device_types="cpu")
def weighted_clamped_swiglu_backward(
    grad: Tensor,
    pairs: Tensor,
    weights: Tensor,
    bias: Tensor,
    experts: Tensor,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of pairs and of the weights, and the weighted result again."""
    given = pairs.float() + bias[experts.int()].float()
    gate, up = given[:, ::2].clamp(max=limit), given[:, 1::2].clamp(-limit, limit)
    sigmoid = torch.sigmoid(alpha * gate)
    product, weight = gate * sigmoid * (up + 1), weights.float()[:, None]
    d_product = grad.float() * weight
    d_gate = d_product * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    # A number beyond its limit has no gradient.
    d_gate = d_gate.masked_fill(given[:, ::2] > limit, 0)
    d_up = (d_product * gate * sigmoid).masked_fill(given[:, 1::2].abs() > limit, 0)
    d_pairs = torch.stack((d_gate, d_up), dim=-1).flatten(1)
    d_weights = (grad.float() * product).sum(1).to(weights.dtype)
    return d_pairs.to(pairs.dtype), (product * weight).to(pairs.dtype), d_weights


def clamped_swiglu(pairs: Tensor, alpha: float, limit: float) -> Tensor:
    """The result for pairs that have their bias."""
    gate, up = pairs[..., ::2].clamp(max=limit), pairs[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


# The operators above give the types of all arguments.


@weighted_clamped_swiglu.register_fake
def _(pairs: Tensor, *_: Any) -> Tensor:
    return pairs.new_empty(len(pairs), pairs.shape[1] // 2)


@weighted_clamped_swiglu_backward.register_fake
def _(grad: Tensor, pairs: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(pairs), torch.empty_like(grad), torch.empty_like(weights)


# This module imports Triton, which is missing where there is no GPU.


@weighted_clamped_swiglu.register_kernel("cuda")
def _(*given: Any) -> Tensor:
    from shardwise.kernels import clamped_swiglu_triton as kernels

    return kernels.weighted_clamped_swiglu(*given)


@weighted_clamped_swiglu_backward.register_kernel("cuda")
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from shardwise.kernels import clamped_swiglu_triton as kernels

    return kernels.weighted_clamped_swiglu_backward(*given)
