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
    norm: Tensor,
    bias: Tensor,
    numbers: Sequence[float],
) -> None:
    """Update `params` by gradients whose norm over all ranks is `norm`; not where it is not finite.

    `numbers` are the rate, both betas, eps, the decay, and the norm to clip to, or infinity.
    """
    rate, beta1, beta2, eps, decay, clip_norm = numbers
    if not norm.isfinite():
        return
    clip = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        clipped = grad * clip
        mean.lerp_(clipped, 1 - beta1)
        square.mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
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
    norm: Tensor,
    bias: Tensor,
    numbers: Sequence[float],
) -> None:
    # Imported when a GPU needs it: elsewhere there is no Triton.
    from shardwise.kernels.adamw_triton import launch

    for tensors in zip(params, grads, means, squares, strict=True):
        launch(*tensors, norm, bias, numbers)
