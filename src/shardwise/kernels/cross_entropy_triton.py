"""The kernel of `cross_entropy.py`. One program computes one token, whose logits fit into the
cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.facts.head_form import PLAIN, HeadForm

_BLOCK = 4096


def turn(output: Tensor, labels: Tensor, ignored: int, form: HeadForm = PLAIN) -> Tensor:
    """Overwrite the head's output with its gradient and return the loss of every token. Each row is
    contiguous; there may be room between rows."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=output.device)
    _turn[losses.shape](
        output,
        labels,
        losses,
        ignored,
        SCALE=form.logit_scale,
        CAP=form.cap,
        STRIDE=output.stride(0),
        WIDTH=output.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return losses


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _logits_of(x, SCALE: tl.constexpr, CAP: tl.constexpr):
    if SCALE != 1.0:
        x = x * SCALE
    if CAP is not None:
        x = CAP * _tanh(x * (1 / CAP))
    return x


@triton.jit
def _turn(
    output,
    labels,
    losses,
    ignored,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    counts = (label != ignored).to(tl.float32)
    row = output + token * STRIDE
    # The label's logit is read before the reductions below, which are barriers. Afterwards it is
    # overwritten.
    score = _logits_of(tl.load(row + tl.maximum(label, 0)).to(tl.float32), SCALE, CAP)
    most = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        # What is beyond the row must stay out whatever a scale or a cap would make of it.
        x = tl.where(at < WIDTH, _logits_of(x, SCALE, CAP), float("-inf"))
        larger = tl.maximum(most, tl.max(x, axis=0))
        sums = sums * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    norm = most + tl.log(tl.sum(sums, axis=0))
    tl.store(losses + token, (norm - score) * counts)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        x = _logits_of(x, SCALE, CAP)
        grad = tl.exp(x - norm) - (at == label).to(tl.float32)
        if CAP is not None:
            share = x * (1 / CAP)
            grad = grad * (1 - share * share)
        tl.store(row + at, grad * (counts * SCALE), mask=at < WIDTH)
