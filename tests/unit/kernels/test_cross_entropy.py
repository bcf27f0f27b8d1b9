"""The loss and its gradient in place of the logits, eager and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.kernels.cross_entropy import IGNORE_INDEX, turn_into_gradient


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, is_compiled: bool) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(19, 97, dtype=dtype), torch.randint(0, 97, (19,))
    labels[3] = IGNORE_INDEX
    leaf = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    expected.backward()
    turn = torch.compile(turn_into_gradient, dynamic=False) if is_compiled else turn_into_gradient
    # The loss is read from logits that the same function overwrites.
    torch.testing.assert_close(turn(logits, labels), expected.detach())
    assert leaf.grad is not None
    torch.testing.assert_close(logits.float(), leaf.grad.to(dtype).float())
