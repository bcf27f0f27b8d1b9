"""Running out of memory leaves figures and an error that says what to change. No GPU: the
allocator's figures are made up, the error is raised where a step would raise it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from shardwise.errors import ExitCode, UserError
from shardwise.plan.planned import Plan
from shardwise.training import oom, rank_run
from shardwise.training.step import Stepper
from shardwise.units import GIB

HELD = oom.DeviceMemory(
    allocated=70 * GIB, reserved=78 * GIB, peak_allocated=71 * GIB, peak_reserved=79 * GIB,
    retries=3, capacity=80 * GIB,
)  # fmt: skip
CAUSE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.10 GiB free."


@pytest.fixture
def plan(lone_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(oom, "device_memory", lambda: HELD)
    return lone_plan()


def run_out(plan: Plan, *, start: int, step: int) -> UserError:
    with pytest.raises(UserError) as caught, oom.explained_oom(plan, 0, start, lambda: step):
        raise torch.OutOfMemoryError(f"{CAUSE}\nSee documentation.")
    return caught.value


def test_a_step_of_the_loop_that_runs_out_says_plan_measured_and_cure(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(CAUSE)

    monkeypatch.setattr(Stepper, "run", run)
    with pytest.raises(UserError) as caught:
        rank_run.run(plan, lambda text: None)
    error = caught.value
    assert error.what.startswith("out of memory in step 1: 79.0 GiB reserved of 80.0 GiB, the plan")
    file = plan.run_dir / "profile" / "oom-rank-0.json"
    assert error.why == f"{CAUSE}; see {file}"
    assert "memory.checkpoint_activations=full, or train.micro_batch=1" in error.fix
    assert "observe.memory_history=true" in error.fix
    # The same step would run out again: the launcher must not start anew.
    assert error.code == ExitCode.DOES_NOT_FIT
    figures = json.loads(file.read_text())
    assert figures["measured"]["peak_allocated"] == 71 * GIB
    assert figures["planned"]["activations"] == plan.memory.activations
    assert (figures["step"], figures["micro_batch"]) == (1, 2)


def test_a_run_that_has_fit_so_far_may_start_again(plan: Plan) -> None:
    assert run_out(plan, start=100, step=101).code == ExitCode.DOES_NOT_FIT
    assert run_out(plan, start=100, step=102).code == ExitCode.WORKER_DIED


def test_with_history_there_is_a_snapshot_too(
    plan: Plan, lone_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "dump_memory_history", lambda path: path.write_bytes(b"snapshot"))
    error = run_out(lone_plan("observe.memory_history=true"), start=0, step=0)
    snapshot = plan.run_dir / "profile" / "oom-rank-0.pickle"
    assert snapshot.read_bytes() == b"snapshot"
    assert str(snapshot) in error.why and "memory_history" not in error.fix


def test_a_directory_that_takes_no_file_hides_nothing(plan: Plan) -> None:
    (plan.run_dir / "profile").write_text("in the way")
    error = run_out(plan, start=0, step=0)
    assert error.why == CAUSE


def test_another_error_passes_as_it_is(plan: Plan) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes differ"),
        oom.explained_oom(plan, 0, 0, lambda: 0),
    ):
        raise RuntimeError("shapes differ")
