"""Cross-entropy of a slice of tokens that overwrites the head's output with its gradient.

A second matrix of that size would be the peak of a step. On a GPU this is a Triton kernel that
reads a row from memory once and a second time from the cache. The compiler's kernel reads it twice
from memory. A scale and a soft cap after the head are part of both, and move no byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.facts.head_form import PLAIN, HeadForm

IGNORE_INDEX = -100


def scaled_and_capped(
    output: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """cap * tanh(scale * output / cap), and what the cap makes of a gradient."""
    scaled = output if scale == 1 else output * scale
    if cap is None:
        return scaled, None
    share = torch.tanh(scaled / cap)
    return cap * share, 1 - share * share


def turn_into_gradient(output: Tensor, labels: Tensor, form: HeadForm = PLAIN) -> Tensor:
    """Overwrite the head's output with its gradient and return the summed loss. Ignored labels do
    not count."""
    return turn_by_token(output, labels, form).sum()


def turn_by_token(output: Tensor, labels: Tensor, form: HeadForm = PLAIN) -> Tensor:
    """The same with the loss of each token. The gradient of a token is that of its own loss."""
    valid = labels != IGNORE_INDEX
    scores, slope = scaled_and_capped(output.float(), form.logit_scale, form.cap)
    log_norm = scores.logsumexp(dim=-1, keepdim=True)
    # Comparing with the label needs no scatter. For a scatter the compiler would write the fp32
    # scores to memory. Nor is the score gathered: torch 2.11 compiles a gather that reads `output`
    # after it is overwritten.
    chosen = torch.arange(output.shape[1], device=output.device) == labels.clamp(min=0)[:, None]
    score = torch.where(chosen, scores, 0.0).sum(dim=-1)
    losses = (log_norm.squeeze(1) - score) * valid
    grad = (scores - log_norm).exp() - chosen.to(scores.dtype)
    if slope is not None:
        grad *= slope
    output.copy_(grad * (valid * form.logit_scale)[:, None])
    return losses


def turn_by_triton(output: Tensor, labels: Tensor, form: HeadForm = PLAIN) -> Tensor:
    """`turn_into_gradient` by a Triton kernel."""
    return turn_by_token_by_triton(output, labels, form).sum()


def turn_by_token_by_triton(output: Tensor, labels: Tensor, form: HeadForm = PLAIN) -> Tensor:
    """`turn_by_token` by a Triton kernel."""
    # Triton is imported when a GPU needs it. It is not installed everywhere.
    from shardwise.kernels.cross_entropy_triton import turn

    return turn(output, labels, IGNORE_INDEX, form)
