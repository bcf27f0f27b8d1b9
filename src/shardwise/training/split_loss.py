"""Cross-entropy over a vocabulary that ranks have parts of. No rank ever has all logits of a token.

Each rank sums the exponentials of its own logits. For each token, the ranks exchange the logarithm
of that sum and the score of the label, which one of them has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.facts.head_form import HeadForm
from shardwise.internals.tensor_collectives import gathered
from shardwise.kernels.cross_entropy import IGNORE_INDEX, scaled_and_capped
from shardwise.model.cuts import own_cuts
from shardwise.model.override import surround_forward
from shardwise.parallel.moved_rows import all_columns, name_of, share

_ELSEWHERE = -1


def divide_head(head: nn.Module, group: ProcessGroup) -> None:
    """Let a head that has a part of the vocabulary, in the loss's form, be called by all ranks with
    the same tokens. Without labels it gathers the logits of all ranks."""
    surround_forward([head], "Divided", _over_ranks(name_of(group)))


def _over_ranks(group: str) -> Callable[..., Any]:
    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def divided(self: Any, hidden: Tensor, labels: Tensor | None = None, **how: Any) -> Tensor:
            cut = own_cuts(self)["weight"]
            hidden = share(hidden, group)
            if labels is not None:
                loss: Tensor = forward(self, hidden, _labels_here(labels, cut.part), **how)
                return loss
            sizes = [len(replace(cut, index=index).part) for index in range(cut.count)]
            return all_columns(forward(self, hidden), group, sizes)

        return divided

    return around


def _labels_here(labels: Tensor, part: range) -> Tensor:
    """Labels as rows of this rank's part; those of other ranks have a number of their own."""
    is_here = (labels >= part.start) & (labels < part.stop)
    elsewhere = torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, _ELSEWHERE)
    return torch.where(is_here, labels - part.start, elsewhere)


def turn_over_ranks(
    group: ProcessGroup, *, compiled: bool
) -> Callable[[Tensor, Tensor, HeadForm], Tensor]:
    """The function that overwrites a rank's part of the logits with its gradient, and returns the
    loss of each token."""
    sums_of = torch.compile(_own_sums, dynamic=False) if compiled else _own_sums
    overwrite = torch.compile(_overwrite, dynamic=False) if compiled else _overwrite

    name = name_of(group)

    def turn(output: Tensor, labels: Tensor, form: HeadForm) -> Tensor:
        mine = sums_of(output, labels, form)
        every = gathered(mine[None], group.size(), name)
        log_norm, score = every[:, 0].logsumexp(0), every[:, 1].sum(0)
        overwrite(output, labels, form, log_norm)
        losses: Tensor = (log_norm - score) * (labels != IGNORE_INDEX)
        return losses

    return turn


def _own_sums(output: Tensor, labels: Tensor, form: HeadForm) -> Tensor:
    """For each token: the logarithm of the sum, and the label's score where it is here."""
    scores, _ = scaled_and_capped(output.float(), form.logit_scale, form.cap)
    score = torch.where(_is_label(output, labels), scores, 0.0).sum(-1)
    return torch.stack([scores.logsumexp(-1), score])


def _overwrite(output: Tensor, labels: Tensor, form: HeadForm, log_norm: Tensor) -> None:
    scores, slope = scaled_and_capped(output.float(), form.logit_scale, form.cap)
    grad = (scores - log_norm[:, None]).exp() - _is_label(output, labels).to(scores.dtype)
    if slope is not None:
        grad *= slope
    output.copy_(grad * ((labels != IGNORE_INDEX) * form.logit_scale)[:, None])


def _is_label(output: Tensor, labels: Tensor) -> Tensor:
    return torch.arange(output.shape[1], device=output.device) == labels[:, None]
