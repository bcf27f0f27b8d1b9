"""Cross-entropy of a slice of tokens that overwrites the logits with their gradient.

A second matrix of that size would be the peak of a step. On a GPU this is a Triton kernel that
reads a row from memory once and a second time from the cache. The compiler's kernel reads it twice
from memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100


def turn_into_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite `logits` with their gradient and return the summed loss. Ignored labels do not
    count."""
    valid = labels != IGNORE_INDEX
    scores = logits.float()
    log_norm = scores.logsumexp(dim=-1, keepdim=True)
    # Comparing with the label needs no scatter. For a scatter the compiler would write the fp32
    # scores to memory. Nor is the score gathered: torch 2.11 compiles a gather that reads `logits`
    # after they are overwritten.
    chosen = torch.arange(logits.shape[1], device=logits.device) == labels.clamp(min=0)[:, None]
    score = torch.where(chosen, scores, 0.0).sum(dim=-1)
    loss = ((log_norm.squeeze(1) - score) * valid).sum()
    grad = (scores - log_norm).exp() - chosen.to(scores.dtype)
    logits.copy_(grad * valid[:, None])
    return loss


def turn_by_triton(logits: Tensor, labels: Tensor) -> Tensor:
    """The same by a Triton kernel."""
    # Triton is imported when a GPU needs it. It is not installed everywhere.
    from shardwise.kernels.cross_entropy_triton import turn

    return turn(logits, labels, IGNORE_INDEX).sum()
