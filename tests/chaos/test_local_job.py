"""A job in the background of this machine: submitted, asked, stopped and submitted again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_ranks import events_of
from slow_steps import SlowSteps
from stand_in import StandIn

from commands import rank_environment

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TIMEOUT_S = 300.0
CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 16}
cluster: 1xCPU
train: {steps: 100000, global_batch: 2, check_loss: false}
checkpoint: {every: 0}
observe: {log_every: 1}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_job_in_the_background_saves_when_it_is_stopped_and_goes_on(
    tmp_path: Path, shardwise: Run
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    run_dir = tmp_path / "runs" / "run"

    def status() -> dict[str, object]:
        return dict(json.loads(shardwise("status", str(run_dir), "--json").stdout))

    def wait(is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_over():
            file = run_dir / "launch" / "output.log"
            assert time.monotonic() < deadline, file.read_text() if file.exists() else "no output"
            time.sleep(0.2)

    with StandIn() as stand_in:
        given = (f"runs_dir={tmp_path / 'runs'}", f"launch.command={stand_in.path}")
        launch = ("launch", str(tmp_path / "run.yaml"), "--submit", *given)
        steps = SlowSteps(tmp_path, seconds=1)
        steps.hold()
        environ = rank_environment() | steps.environ
        assert "submitted: local job" in shardwise(*launch, environ=environ).stdout
        record = run_dir / "events.jsonl"
        wait(lambda: record.exists() and len(events_of(run_dir, "step")) >= 2)
        refused = shardwise(*launch, environ=environ, expect=4).stderr
        assert "the run run was submitted before: local job" in refused
        assert status()["state"] == "running"
        assert "asked to stop: process" in shardwise("stop", str(run_dir)).stdout
        wait(lambda: bool(events_of(run_dir, "stopped")))
        wait(lambda: status()["state"] == "ended")
        steps.release()
        (stopped,) = events_of(run_dir, "stopped")
        assert stopped["reason"] == "SIGTERM" and status()["checkpoint"] == stopped["step"]
        # The same command goes on; attach prints what its ranks say until it ends.
        shardwise(*launch, f"train.stop_after={stopped['step'] + 2}", environ=environ)
        said = shardwise("attach", str(run_dir)).stdout
        assert f"resumed at step {stopped['step']}" in said
        assert f"stopped after step {stopped['step'] + 2}" in said
    assert status()["record"] == "ended as train.stop_after says"
