"""AdamW in one pass over its tensors: 16 bytes of a parameter are read and 12 written, no more.

torch's own fused kernel, where it clips as well, writes the clipped gradients back, which nobody
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


def corrections(count: Tensor, betas: tuple[float, float]) -> Tensor:
    """What Adam's two moments are divided by in update number `count`, on the device.

    In double precision: at first they are small differences of numbers near one.
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
    """Update `params`, or not.

    `known` is what only the device knows: 1 where nothing is to be done, else 0, what gradients are
    divided by, and both corrections; `numbers` are the rate, both betas, eps and the decay.
    """
    rate, beta1, beta2, eps, decay = numbers
    found_inf, grad_scale, *bias = known
    if found_inf != 0:
        return
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        scaled = grad / grad_scale
        mean.lerp_(scaled, 1 - beta1)
        square.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        root = (square / bias[1]).sqrt() + eps
        param.mul_(1 - rate * decay).sub_(rate / bias[0] * mean / root)


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
    # Imported when a GPU needs it: elsewhere there is no Triton.
    from shardwise.kernels.adamw_triton import launch

    for tensors in zip(params, grads, means, squares, strict=True):
        launch(*tensors, known, numbers)
