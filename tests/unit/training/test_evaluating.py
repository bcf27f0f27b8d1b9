from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint.eval_history import HeldOut
from shardwise.training.evaluating import Evaluating
from shardwise.training.reached import Reached


def evaluating(**train: Any) -> Evaluating:
    settings = SimpleNamespace(
        train=SimpleNamespace(**{"eval_every": 10, "patience": 2, "min_gain": 0.1, **train}),
        checkpoint=SimpleNamespace(keep_best=True),
    )
    mesh = SimpleNamespace(split=None)
    session: Any = SimpleNamespace(plan=SimpleNamespace(settings=settings), mesh=mesh)
    nothing: Any = None
    return Evaluating(session, nothing, nothing)


@pytest.mark.parametrize(
    ("step", "evaluated", "every", "due"),
    [
        (20, 10, 10, True),  # a signal stopped the run after this step, before its evaluation
        (20, 20, 10, False),
        (25, 20, 10, False),
        (20, 10, 0, False),
    ],
)
def test_a_step_is_evaluated_once(step: int, evaluated: int, every: int, due: bool) -> None:
    reached = Reached(step=step, held_out=HeldOut(step=evaluated))
    assert evaluating(eval_every=every).is_due(reached) is due


def test_patience_ends_a_run_and_says_why() -> None:
    found = HeldOut().after(0, 5.0, 0.1).after(10, 4.95, 0.1)
    reached = Reached(step=10, held_out=found)
    assert not evaluating().ends_early(reached) and evaluating().is_worth_saving(reached)
    reached = Reached(step=20, held_out=found.after(20, 4.97, 0.1))
    assert evaluating().ends_early(reached) and not evaluating().is_worth_saving(reached)
    assert not evaluating(patience=0).ends_early(reached)
    why = evaluating().why_early(reached)
    assert why.startswith("the held-out loss has not fallen by 0.1 in 2 evaluations")
    assert why.endswith("the best is 4.9500 at step 10")
