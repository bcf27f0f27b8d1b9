from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from shardwise.checkpoint.eval_history import HeldOut, held_out_of
from shardwise.checkpoint.read import find_checkpoint
from shardwise.checkpoint.store import best_of, list_checkpoints, outdated
from shardwise.errors import UserError


def found(losses: dict[int, float], min_gain: float = 0.0) -> HeldOut:
    held_out = HeldOut()
    for step, loss in losses.items():
        held_out = held_out.after(step, loss, min_gain)
    return held_out


@pytest.mark.parametrize(
    ("losses", "min_gain", "best", "without_gain"),
    [
        ({0: 5.0}, 0.0, None, 0),
        ({0: 5.0, 10: 6.0, 20: 5.5}, 0.0, 20, 2),  # the first model is no checkpoint
        ({10: 5.0, 20: 4.0, 30: 4.0}, 0.0, 20, 1),
        ({10: 5.0, 20: 4.9, 30: 4.8}, 0.15, 30, 0),  # two small falls together
        ({10: 5.0, 20: 4.9, 30: 4.95}, 0.15, 20, 2),
        ({10: math.nan, 20: 5.0, 30: math.inf}, 0.0, 20, 1),
    ],
)
def test_the_best_is_the_lowest_and_gains_are_counted(
    losses: dict[int, float], min_gain: float, best: int | None, without_gain: int
) -> None:
    held_out = found(losses, min_gain)
    assert (held_out.best_step, held_out.without_gain) == (best, without_gain)
    assert held_out.best_loss == (None if best is None else losses[best])


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"loss": math.nan}, {"without_gain": None}, {"best_step": True}, {"x": 1}],
)
def test_what_no_run_writes_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        held_out_of(wrong)


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    root, losses = tmp_path / "checkpoints", {10: 5.0, 20: 4.0, 30: 4.5, 40: 4.7}
    for step in losses:
        so_far = found({at: loss for at, loss in losses.items() if at <= step})
        make_checkpoint(root, step, held_out=so_far)
    assert [each.step for each in outdated(root, 1, keep_best=True)] == [10, 30]
    assert [each.step for each in outdated(root, 1)] == [10, 20, 30]
    best = best_of(list_checkpoints(root))
    assert best is not None and best.manifest.held_out == found({10: 5.0, 20: 4.0})
    assert find_checkpoint(tmp_path, best=True) == best.path
    for wrong in (dict(run=tmp_path, step=20), dict(run=best.path)):
        with pytest.raises(UserError, match=r"--best (was asked for|and --step 20)"):
            find_checkpoint(**wrong, best=True)


def test_a_best_step_that_was_not_kept_is_said_to_be_gone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint there was evaluated"):
        find_checkpoint(tmp_path, best=True)
    make_checkpoint(tmp_path / "checkpoints", 30, held_out=found({20: 4.0, 30: 5.0}))
    with pytest.raises(UserError, match="the best step was 20, and it has steps 30"):
        find_checkpoint(tmp_path, best=True)
