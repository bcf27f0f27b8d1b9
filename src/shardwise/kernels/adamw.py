"""AdamW in one pass over its tensors.

For each parameter 16 bytes are read and 12 are written. torch's fused kernel also writes the
clipped gradients back, which nobody reads. Moments may be bf16; then 12 bytes are read and 8 are
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


def corrections(count: Tensor, betas: tuple[float, float]) -> Tensor:
    """The bias corrections that divide Adam's two moments in update number `count`, on the device.

    They are computed in double precision, because at first they are small differences of numbers
    near one.
    """
    return torch.stack([1 - beta ** count.double() for beta in betas]).float()


@custom_op("shardwise::adamw", mutates_args=("params", "means", "squares"), device_types="cpu")
def update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    known: Tensor,
    numbers: Sequence[float],
) -> None:
    """Update `params`, unless the device finds that it must not.

    `known` holds what only the device knows: 1 where the update is skipped and else 0, the divisor
    of the gradients, both corrections, and the number of the update. `numbers` are the learning
    rate, both betas, eps and the weight decay.
    """
    rate, beta1, beta2, eps, decay = numbers
    found_inf, grad_scale, bias1, bias2, count = known
    if found_inf != 0:
        return
    tensors = zip(params, grads, means, squares, strict=True)
    for index, (param, grad, mean, square) in enumerate(tensors):
        scaled = grad / grad_scale
        m = mean.float().lerp(scaled, 1 - beta1)
        v = square.float().mul(beta2).addcmul(scaled, scaled, value=1 - beta2)
        root = (v / bias2).sqrt() + eps
        param.mul_(1 - rate * decay).sub_(rate / bias1 * m / root)
        if mean.dtype == torch.bfloat16:
            chance = chance_of(param, int(count), index)
            m, v = _rounded(m, chance & 0xFFFF), _rounded(v, chance >> 16)
        mean.copy_(m)
        square.copy_(v)


def chance_of(like: Tensor, count: int, index: int) -> Tensor:
    """32 random bits for each number, different in each update.

    They are a hash of the place and the update, so a run that resumes rounds as it would have.
    """
    places = torch.arange(like.numel(), device=like.device).view(like.shape)
    bits = (places * 0x9E3779B1 + (count + index * 65537) * 0x7FEB352D) & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _rounded(x: Tensor, chance: Tensor) -> Tensor:
    """Round to bf16 stochastically: up or down, the nearer the likelier.

    Most changes of a moment are smaller than bf16's steps, and rounding to nearest would lose them
    all.
    """
    whole = (x.view(torch.int32) + chance.int()) & -0x10000
    return whole.view(torch.float32).to(torch.bfloat16)


@update.register_fake
def _(*arguments: Any) -> None:
    return


@update.register_kernel("cuda")
def _(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    known: Tensor,
    numbers: Sequence[float],
) -> None:
    # Triton is imported when a GPU needs it. It is not installed everywhere.
    from shardwise.kernels.adamw_triton import launch

    for index, tensors in enumerate(zip(params, grads, means, squares, strict=True)):
        launch(*tensors, known, numbers, index)
