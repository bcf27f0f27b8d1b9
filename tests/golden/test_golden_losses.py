"""Losses of small runs through the real command line, against recorded ones.

After a change that is meant to change numbers: SHARDWISE_WRITE_GOLDEN=1 pytest tests/golden
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = """\
model: tiny-qwen
data: {source: text, path: TEXT, seq_len: 64}
cluster: 2xCPU
shard: {strategy: full_shard}
precision: {param: fp32}
memory: {checkpoint_activations: full}
optim: {lr: 3e-3, warmup_steps: 2}
train: {steps: 8, global_batch: 8}
checkpoint: {at_end: false}
observe: {log_every: 1}
"""


@pytest.mark.dist
def test_losses_are_the_recorded_ones(
    tmp_path: Path, shardwise: Run, assert_golden: Callable[[str, Path], None]
) -> None:
    text = tmp_path / "sums.txt"
    lines = (f"{n} times {n} is {n * n}, and {n} plus {n} is {n + n}.\n" for n in range(1000))
    text.write_text("".join(lines))
    (tmp_path / "golden.yaml").write_text(CONFIG.replace("TEXT", str(text)))
    shardwise("train", str(tmp_path / "golden.yaml"), f"runs_dir={tmp_path}")
    assert_golden("tiny-qwen", tmp_path / "golden")
