"""Batches without a finite gradient: skipped and named, gone back from, and given up on."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_ranks import (
    STEPS,
    WORLD,
    Fault,
    Job,
    end_state,
    events_of,
    logs,
    newest_good,
    prepare,
    run_clean,
)

from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode

pytestmark = pytest.mark.dist

# From the fourth batch on: none is good again.
FOR_EVER = range(3, 1000)


@pytest.mark.long
@pytest.mark.parametrize("bad", [{1, 2, 5}, {0, 4}, {5, 6, 7}], ids=str)
def test_a_few_are_skipped(bad: set[int], tmp_path: Path) -> None:
    assert_skipped(tmp_path / "run", bad)


def test_sequences_of_a_skipped_batch_are_named(tmp_path: Path) -> None:
    assert_skipped(tmp_path / "run", {2})
    (event,) = events_of(tmp_path / "run", "nonfinite")
    assert (event["step"], event["batch"], event["sequences"]) == (3, 2, [8, 12])


def assert_skipped(run_dir: Path, bad: set[int]) -> None:
    """Train with these bad batches: all steps are made, of the others."""
    run_clean(prepare(run_dir), bad)
    assert skipped(run_dir) == sorted(bad)
    assert place(run_dir) == (STEPS, STEPS + len(bad))
    steps = [event["step"] for event in events_of(run_dir, "step")]
    assert steps == list(range(1, STEPS + 1))
    assert not events_of(run_dir, "rollback")


def test_too_many_in_a_row_roll_back(tmp_path: Path) -> None:
    """Step 5 is made of batch 4, undone, and made again of the first batch past the bad ones."""
    run_clean(prepare(tmp_path / "run", train__max_nonfinite=2), {5, 6, 7})
    (event,) = events_of(tmp_path / "run", "rollback")
    assert (event["step"], event["position"]) == (4, 8)
    assert skipped(tmp_path / "run") == [5, 6, 7]
    assert place(tmp_path / "run") == (STEPS, 8 + STEPS - 4)


def test_rolls_back_to_a_save_in_flight(tmp_path: Path) -> None:
    """The newest checkpoint is still being written when the bad batches come."""
    run_clean(prepare(tmp_path / "run", train__max_nonfinite=1), {4, 5})
    (event,) = events_of(tmp_path / "run", "rollback")
    assert (event["step"], event["position"]) == (4, 6)
    assert place(tmp_path / "run") == (STEPS, 6 + STEPS - 4)


@pytest.mark.parametrize("param", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
def test_for_ever_bad_is_given_up(param: str, tmp_path: Path) -> None:
    """fp16 too: a loss that is not a number is no overflow that a smaller loss scale would mend."""
    settings = {"train__max_nonfinite": 2, "precision__param": param}
    plan_path = prepare(tmp_path / "run", **settings)
    codes = Job(plan_path, bad=FOR_EVER).finish()
    assert codes == [ExitCode.DIVERGED] * WORLD, logs(tmp_path / "run")
    assert len(events_of(tmp_path / "run", "rollback")) == 2
    assert skipped(tmp_path / "run") == list(range(3, 12))
    assert newest_good(tmp_path / "run") == 2
    assert not events_of(tmp_path / "run", "loss_scale")


def test_bad_before_any_checkpoint_is_given_up(tmp_path: Path) -> None:
    plan_path = prepare(tmp_path / "run", train__max_nonfinite=1)
    assert Job(plan_path, bad=range(9)).finish() == [ExitCode.DIVERGED] * WORLD
    assert newest_good(tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("bad", "max_nonfinite"),
    [
        pytest.param({1, 3, 4, 8}, 3, id="skips", marks=pytest.mark.long),
        pytest.param({5, 6, 7}, 2, id="rollback"),
    ],
)
def test_killed_run_goes_on_past_skipped_batches(
    bad: set[int], max_nonfinite: int, tmp_path: Path
) -> None:
    """Killed in the save after the bad batches, a run ends where the uninterrupted one does."""
    run_clean(prepare(tmp_path / "whole", train__max_nonfinite=max_nonfinite), bad)
    plan_path = prepare(tmp_path / "killed", train__max_nonfinite=max_nonfinite)
    for step in (4, 6):
        assert -9 in Job(plan_path, Fault(1, step, 3), bad).finish()
    run_clean(plan_path, bad)
    assert place(tmp_path / "killed") == place(tmp_path / "whole")
    assert end_state(tmp_path / "killed") == end_state(tmp_path / "whole")


def skipped(run_dir: Path) -> list[int]:
    """The batches that the run says it skipped."""
    return [event["batch"] for event in events_of(run_dir, "nonfinite")]


def place(run_dir: Path) -> tuple[int, int]:
    """Step and position of the last checkpoint."""
    manifest = list_checkpoints(run_dir / "checkpoints")[-1].manifest
    return manifest.step, manifest.position
