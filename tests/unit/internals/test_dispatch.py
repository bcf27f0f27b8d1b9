"""Operators as they are dispatched, and the results that selective checkpointing keeps."""

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

from shardwise.internals import dispatch
from shardwise.internals.dispatch import KeptResults, TorchDispatchMode, written_arguments
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


def test_a_kept_result_can_be_copied_before_it_is_changed() -> None:
    keeping, _ = create_selective_checkpoint_contexts(keep_all)
    with keeping:
        result = torch.ones(2) * 3
    kept = KeptResults(keeping)
    kept.copy_those_of(result)
    result.zero_()
    values = [entry.val for entry in kept._entries() if isinstance(entry.val, Tensor)]
    assert any(torch.equal(value, torch.full((2,), 3.0)) for value in values)


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


def test_results_that_lie_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptResults, "_entries", lambda self: iter(()))
    with pytest.raises(Changed, match="elsewhere"):
        dispatch.check_kept()
