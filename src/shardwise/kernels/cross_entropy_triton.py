"""The kernel of `cross_entropy.py`. One program computes one token, whose logits fit into the
cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def turn(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Overwrite logits with their gradient and return the loss of every token. Each row is
    contiguous; there may be room between rows."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    _turn[losses.shape](
        logits,
        labels,
        losses,
        ignored,
        STRIDE=logits.stride(0),
        WIDTH=logits.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return losses


@triton.jit
def _turn(
    logits,
    labels,
    losses,
    ignored,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    counts = (label != ignored).to(tl.float32)
    row = logits + token * STRIDE
    # The label's logit is read before the reductions below, which are barriers. Afterwards it is
    # overwritten.
    score = tl.load(row + tl.maximum(label, 0)).to(tl.float32)
    most = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(x, axis=0))
        sums = sums * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    norm = most + tl.log(tl.sum(sums, axis=0))
    tl.store(losses + token, (norm - score) * counts)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        grad = tl.exp(x - norm) - (at == label).to(tl.float32)
        tl.store(row + at, grad * counts, mask=at < WIDTH)
