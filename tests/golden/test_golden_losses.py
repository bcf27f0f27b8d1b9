"""Losses of small runs through the real command line, against recorded ones.

After a change that is meant to change numbers: SHARDWISE_WRITE_GOLDEN=1 pytest tests/golden
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
GOLDEN = Path(__file__).with_name("losses.json")

CONFIG = """\
cluster: 2xCPU
shard: {strategy: full_shard}
precision: {param: fp32}
optim: {lr: 3e-3, warmup_steps: 2}
train: {steps: 8, global_batch: 8}
checkpoint: {at_end: false}
observe: {log_every: 1}
"""
RUNS = {
    "tiny-llama": "model: tiny-llama\ndata: {source: text, path: TEXT, seq_len: 64}\n",
    "tiny-qwen": "model: tiny-qwen\ndata: {source: synthetic, seq_len: 64}\n"
    "memory: {checkpoint_activations: full}\n",
}


def write_text(file: Path) -> None:
    lines = (f"{n} times {n} is {n * n}, and {n} plus {n} is {n + n}.\n" for n in range(1000))
    file.write_text("".join(lines))


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_the_recorded_ones(
    name: str, tmp_path: Path, shardwise: Run, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    write_text(tmp_path / "sums.txt")
    text = RUNS[name].replace("TEXT", str(tmp_path / "sums.txt")) + CONFIG
    (tmp_path / "golden.yaml").write_text(text)
    shardwise("train", str(tmp_path / "golden.yaml"), f"runs_dir={tmp_path}")
    losses = losses_of(tmp_path / "golden")
    assert list(losses) == list(range(1, 9))
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("SHARDWISE_WRITE_GOLDEN") == "1":
        recorded[name] = list(losses.values())
        GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
    assert list(losses.values()) == pytest.approx(recorded[name], rel=1e-4)
