"""Cross-entropy of a slice of tokens whose logits become their own gradient.

A second matrix of that size would be the peak of a step. On a GPU it is a Triton kernel: a row is
read, and read again out of the cache that it is still in. The compiler's kernel reads it twice from
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100


def turn_into_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed loss; ignored labels count nothing."""
    valid = labels != IGNORE_INDEX
    safe = labels.clamp(min=0)[:, None]
    scores = logits.float()
    log_norm = scores.logsumexp(dim=-1, keepdim=True)
    loss = ((log_norm - scores.gather(1, safe)).squeeze(1) * valid).sum()
    # Compared, not scattered: the compiler would write the fp32 scores down to scatter into them.
    chosen = torch.arange(logits.shape[1], device=logits.device) == safe
    grad = (scores - log_norm).exp() - chosen.to(scores.dtype)
    logits.copy_(grad * valid[:, None])
    return loss


def turn_by_triton(logits: Tensor, labels: Tensor) -> Tensor:
    """The same on a GPU."""
    # Imported when a GPU needs it: elsewhere there is no Triton.
    from shardwise.kernels.cross_entropy_triton import turn

    return turn(logits, labels, IGNORE_INDEX).sum()
