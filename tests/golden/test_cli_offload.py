"""Offload through the real command: the host's updates beside the next forward."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, vocab_size: 300, num_hidden_layers: 2}
data: {source: synthetic, seq_len: 32, eval_fraction: 0.1, eval_sequences: 4}
cluster: 2xCPU
shard: {strategy: full_shard}
memory: {offload: cpu}
optim: {lr: 1e-2, clip_norm: 0.5}
train: {steps: 3, global_batch: 8, accumulation: 2, eval_every: 2}
checkpoint: {every: 2, asynchronous: false}
observe: {log_every: 1}
"""


def seen(run: Path) -> list[dict[str, Any]]:
    """Losses, norms and held-out losses of a run, in order."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    kept = ("event", "step", "loss", "grad_norm")
    found = (event for event in events if event["event"] in ("step", "eval"))
    return [{name: event[name] for name in kept if name in event} for event in found]


def checkpoint_of(run: Path, step: int) -> dict[str, str]:
    """The hashes of what ranks have written."""
    place = run / "checkpoints" / f"step-{step:08d}"
    files = json.loads((place / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name.startswith("rank-")}


def test_a_run_is_the_same_with_updates_beside_it(tmp_path: Path, shardwise: Run) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)

    def train(name: str, *words: str) -> Path:
        given = (f"runs_dir={tmp_path}", f"name={name}", *words)
        shardwise("train", str(tmp_path / "run.yaml"), *given)
        return tmp_path / name

    plain = train("plain", "memory.overlap_optimizer=false")
    beside = train("beside")
    plan = json.loads((beside / "plan.json").read_text())["choices"]["overlap_optimizer"]
    assert plan["value"] is True
    assert "forward waits for each of them" in plan["why"]
    assert {event["event"] for event in seen(plain)} == {"step", "eval"}
    assert seen(beside) == seen(plain)
    for step in (2, 3):
        assert len(checkpoint_of(plain, step)) == 2
        assert checkpoint_of(beside, step) == checkpoint_of(plain, step)
