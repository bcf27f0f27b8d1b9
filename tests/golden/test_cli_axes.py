"""A profiled run tells what it has moved along each axis, and the plan's figure beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.metrics.events import read_events
from shardwise.metrics.overlap import profile_of
from shardwise.metrics.trace_file import read_trace

pytestmark = pytest.mark.dist
Run = Callable[..., Any]
# Rows and columns that divide over all ranks, and enough tokens for agreed numbers to vanish.
CONFIG = """\
model: {name: tiny-llama, overrides: {hidden_size: 64, intermediate_size: 128, vocab_size: 512,
  num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4}}
cluster: {name: 4xCPU}
data: {source: synthetic, seq_len: 128, eval_fraction: 0.0}
train: {steps: 3, micro_batch: 2, check_loss: false}
checkpoint: {at_end: false}
observe: {log_every: 1, profile: 2, profile_steps: 2}
"""
MIXTURE = "model.name=tiny-mixtral"
MESHES: dict[str, dict[str, int]] = {
    "blocks and shards": {"tensor": 2, "shard": 2},
    "copies and sequences": {"replicate": 2, "shard": 1, "context": 2},
    "experts": {"shard": 4, "expert": 2},
    "experts on all ranks": {"shard": 4, "expert": 4},
    "stages": {"pipeline": 2, "shard": 2},
    "stages of blocks": {"pipeline": 2, "tensor": 2, "shard": 1},
}
CASES = [
    pytest.param(name, marks=[] if name == "blocks and shards" else pytest.mark.long)
    for name in MESHES
]


@pytest.mark.parametrize("name", CASES)
def test_a_profile_has_the_bytes_of_each_axis_beside_the_plan(
    shardwise: Run, tmp_path: Path, name: str
) -> None:
    axes = MESHES[name]
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = [f"mesh.{axis}={size}" for axis, size in axes.items()]
    words += [MIXTURE] if "expert" in axes else []
    words += ["train.accumulation=2"] if "pipeline" in axes else []
    words += ["model.overrides.tie_word_embeddings=true"] if name == "stages of blocks" else []
    shardwise("train", "run.yaml", "name=run", *words, cwd=tmp_path)
    (event,) = [
        e for e in read_events(tmp_path / "runs/run/events.jsonl") if e["event"] == "profile"
    ]
    rows = {row["axis"]: row for row in event["axes"]}
    moving = {axis for axis, size in axes.items() if size > 1} | ({"shard"} & rows.keys())
    assert moving == rows.keys()
    # The plan has means over the ranks of a pipeline, and the event is the first rank's.
    traces = sorted((tmp_path / "runs/run/profile").glob("*.json.gz"))
    moved = [{a.axis: a.num_bytes for a in profile_of(read_trace(path)).axes} for path in traces]
    assert len(moved) == 4
    # A last stage gathers its head once more than the plan has it.
    exact = 0.06 if "pipeline" in axes else 0.02
    for axis, row in rows.items():
        print(axis, row)
        assert row["num_bytes"] == moved[0][axis]
        mean = sum(each[axis] for each in moved) / len(moved)
        assert mean == pytest.approx(row["planned_bytes"], rel=exact)
        assert row["seconds"] > 0 and row["calls"] > 0
    shown = shardwise("profile", "runs/run", cwd=tmp_path).stdout
    assert "along" in shown and all(f"  {axis} " in shown for axis in rows)
    told = json.loads(shardwise("profile", "runs/run", "--json", cwd=tmp_path).stdout)
    assert [row["axis"] for row in told["axes"]] == list(rows)
    shardwise("report", "runs/run", cwd=tmp_path)
    assert "links&#x27; time in the plan" in (tmp_path / "runs/run/report.html").read_text()
