"""Operators as they are dispatched, and what torch's selective checkpointing refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.internals import dispatch_mode
from shardwise.internals.dispatch_mode import TorchDispatchMode, written_arguments
from shardwise.internals.parts import Changed


class Written(TorchDispatchMode):
    """Notes how many tensors each operator changes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = list(written_arguments(func, args, kwargs or {}))
        self.counts[func.name()] = len(written)
        return func(*args, **(kwargs or {}))


def test_an_operators_schema_says_what_it_changes() -> None:
    x, y = torch.ones(2), torch.ones(2)
    with Written() as seen:
        x.add_(1)
        torch.add(x, y, out=y)
        torch._foreach_mul_([x, y], 2.0)
        x + y
    assert seen.counts == {
        "aten::add_.Tensor": 1,
        "aten::add.out": 1,
        "aten::_foreach_mul_.Scalar": 2,
        "aten::add.Tensor": 0,
    }


def keep_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def test_torch_itself_still_refuses_a_kept_result_that_was_changed() -> None:
    """What the copies are for; a torch that does without them needs this part no more."""

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        before = y.tanh()
        y.add_(1)
        return before + y.sin()

    x = torch.ones(2, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, keep_all)
    with pytest.raises(RuntimeError, match="mutat"):
        checkpoint(forward, x, use_reentrant=False, context_fn=contexts).sum().backward()


def test_a_torch_that_does_not_show_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch_mode.check_kept()
    monkeypatch.setattr(dispatch_mode, "written_arguments", lambda *_: iter(()))
    with pytest.raises(Changed, match="change their arguments"):
        dispatch_mode.check_kept()
