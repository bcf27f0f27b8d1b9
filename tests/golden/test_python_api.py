"""The package's own names, as a script or notebook would use them."""

from __future__ import annotations

import os
from pathlib import Path

import shardwise
from shardwise.metrics.events import read_events


def test_train_from_python(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: tiny-llama\ndata: synthetic\ncluster: 1xCPU\n")
    words = ["data.seq_len=16", "train.steps=3", "train.global_batch=2", f"runs_dir={tmp_path}"]
    config = shardwise.load_config(file, words)
    plan = shardwise.choose_plan(config)
    assert plan.global_batch.value == 2
    environment = dict(os.environ)
    run_dir = shardwise.train(config)
    assert dict(os.environ) == environment
    assert run_dir == plan.run_dir
    assert read_events(run_dir / "events.jsonl")[-1]["finished"] is True
