"""The package's own names, as a script or notebook would use them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardwise
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.events import read_events


def test_train_from_python(tmp_path: Path) -> None:
    """Through to the end, and an error then, since a gate fails that must not."""
    file = tmp_path / "run.yaml"
    file.write_text("model: tiny-llama\ndata: synthetic\ncluster: 1xCPU\n")
    words = ["data.seq_len=16", "train.steps=3", "train.global_batch=2", f"runs_dir={tmp_path}"]
    words += ["cluster.peak_tflops=1000", "gates.min_mfu=0.9", "gates.enforce=true"]
    config = shardwise.load_config(file, words)
    plan = shardwise.choose_plan(config)
    assert plan.global_batch.value == 2
    environment = dict(os.environ)
    with pytest.raises(UserError, match=r"did not pass: .*mfu") as caught:
        shardwise.train(config)
    assert caught.value.code == ExitCode.VERIFY_FAILED
    assert dict(os.environ) == environment
    *_, end, verdict = read_events(plan.run_dir / "events.jsonl")
    assert end["finished"] is True
    assert {gate["name"]: gate["verdict"] for gate in verdict["gates"]}["mfu"] == "fail"
