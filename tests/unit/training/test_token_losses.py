"""The loss of each token by the chunked head: its values and gradients are those of whole
logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.kernels.cross_entropy import IGNORE_INDEX, scaled_and_capped, turn_by_token
from shardwise.training.loss import LinearTokenLosses, Slicing, _scaled

TOKENS, HIDDEN, VOCAB = 37, 16, 29


@pytest.mark.parametrize(
    "form", [PLAIN, HeadForm(scale=0.5, cap=3.0)], ids=["plain", "scaled and capped"]
)
@pytest.mark.parametrize(("chunk", "even"), [(1, 1), (8, 16), (TOKENS, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_weighted_losses_have_the_gradients_of_whole_logits(
    form: HeadForm, chunk: int, even: int, has_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw).requires_grad_()
        for shape in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    labels = torch.randint(VOCAB, (TOKENS,), generator=draw)
    labels[::5] = IGNORE_INDEX
    # What a token counts for depends on the losses of all, as it does where answers are compared.
    shares = torch.randn(TOKENS, generator=draw)

    def objective(losses: Tensor) -> Tensor:
        return F.logsigmoid((losses * shares).sum()) + losses.square().mean()

    leaves = [hidden, weight, *([bias] if has_bias else [])]
    how = Slicing(chunk, partial(turn_by_token, form=form), _scaled, even)
    ours = LinearTokenLosses.apply(hidden, weight, bias if has_bias else None, labels, how)
    logits = F.linear(hidden, weight, bias if has_bias else None)
    logits, _ = scaled_and_capped(logits, form.logit_scale, form.cap)
    whole = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)
    assert not ours[labels == IGNORE_INDEX].any()
    found, wanted = (torch.autograd.grad(objective(x), leaves) for x in (ours, whole))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(5, HIDDEN).requires_grad_(), torch.randn(VOCAB, HIDDEN)
    how = Slicing(2, turn_by_token, _scaled)
    losses = LinearTokenLosses.apply(hidden, weight, None, torch.arange(5), how)
    losses.sum().backward()
    assert hidden.grad is not None and weight.grad is None
