"""Whether a model keeps documents apart is tried out before it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.training.documents import check_documents


class Sums(nn.Module):
    """Every token's logits are the sum of what came before it, of its document or of all."""

    def __init__(self, *, apart: bool, rounding: float = 0.0) -> None:
        super().__init__()
        self.apart, self.rounding = apart, rounding

    def forward(self, input_ids: Tensor, position_ids: Tensor, **given: Any) -> Any:
        sums = input_ids.cumsum(1)
        if self.apart:
            first = torch.arange(input_ids.shape[1]) - position_ids
            sums = sums - (sums - input_ids).gather(1, first)
        # Other documents may change how sums are rounded.
        rounding = 1 + self.rounding * input_ids[0, 0]
        return SimpleNamespace(logits=sums[..., None].float() * rounding)


class Deaf(nn.Module):
    """It takes tokens, and nothing else."""

    def forward(self, input_ids: Tensor) -> Any:
        raise AssertionError("not called")


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_model_that_keeps_them_apart_is_left_as_it_was(rounding: float) -> None:
    model = Sums(apart=True, rounding=rounding)
    check_documents(model, torch.device("cpu"), torch.float32)
    assert model.training


@pytest.mark.parametrize(
    ("model", "why"),
    [(Sums(apart=False), "changes the logits of the next one"), (Deaf(), "position_ids")],
    ids=["mixes", "deaf"],
)
def test_one_that_does_not_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(UserError, match="cannot be kept apart in this model") as caught:
        check_documents(model, torch.device("cpu"), torch.float32)
    assert why in str(caught.value)
