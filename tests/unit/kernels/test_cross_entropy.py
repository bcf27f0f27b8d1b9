"""The loss and its gradient in place of the logits, eager and compiled."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.kernels.cross_entropy import IGNORE_INDEX, turn_into_gradient

FORMS = {
    "plain": PLAIN,
    "scale": HeadForm(scale=0.0625),
    "both scales": HeadForm(hidden_scale=0.1, scale=-3.0),
    "cap": HeadForm(cap=2.0),
    "scale and cap": HeadForm(scale=1.7, cap=2.5),
}


def plainly(output: Tensor, form: HeadForm) -> Tensor:
    """The logits as a family would spell them out."""
    logits = output * (form.hidden_scale * form.scale)
    return logits if form.cap is None else torch.tanh(logits / form.cap) * form.cap


# A compile takes two seconds.
COMPILED = (torch.bfloat16, True, "scale and cap")


@pytest.mark.parametrize(
    ("dtype", "is_compiled", "name"),
    [
        pytest.param(*each, marks=[pytest.mark.long] * (each[1] and each != COMPILED))
        for each in product((torch.float32, torch.bfloat16), (False, True), FORMS)
    ],
)
def test_loss_and_gradient_are_those_of_torch(
    dtype: torch.dtype, is_compiled: bool, name: str
) -> None:
    form = FORMS[name]
    torch.manual_seed(0)
    output, labels = torch.randn(19, 97, dtype=dtype), torch.randint(0, 97, (19,))
    labels[3] = IGNORE_INDEX
    leaf = output.double().clone().requires_grad_()
    logits = plainly(leaf, form)
    expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    expected.backward()

    def turn(output: Tensor, labels: Tensor) -> Tensor:
        return turn_into_gradient(output, labels, form)

    run = torch.compile(turn, dynamic=False) if is_compiled else turn
    # The loss is read from numbers that the same function overwrites.
    torch.testing.assert_close(run(output, labels), expected.detach().float())
    assert leaf.grad is not None
    assert not output[3].any()
    torch.testing.assert_close(output, leaf.grad.to(dtype))
