"""`train.batch_may_change` through the command: a resume with another batch reads on where it
was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: text, path: some.txt, seq_len: 64, tokenizer: byte}
cluster: 1xCPU
precision: {param: fp32}
optim: {lr: 1e-30, weight_decay: 0, schedule: constant}
train: {steps: 6, global_batch: 4, kernels: torch}
observe: {log_every: 1}
"""
NUM_SEQUENCES = 20


def test_a_resume_reads_on_in_batches_of_another_size(
    shardwise: Run, tmp_path: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    text = "".join(f"{n} squared is {n * n}\n" for n in range(400))
    (tmp_path / "some.txt").write_text(text[: 64 * NUM_SEQUENCES])

    def train(name: str, *words: str, expect: int = 0) -> Any:
        said = shardwise("train", "run.yaml", f"name={name}", *words, cwd=tmp_path, expect=expect)
        return said.stderr if expect else said.stdout

    # With a rate of nearly 0 the loss of a step is that of its sequences alone.
    train(
        "single", "train.global_batch=1", f"train.steps={NUM_SEQUENCES}", "checkpoint.at_end=false"
    )
    singles = losses_of(tmp_path / "runs" / "single")

    def mean(first: int, last: int) -> float:
        return sum(singles[number] for number in range(first, last + 1)) / (last + 1 - first)

    train("run", "train.stop_after=2")
    refused = train("run", "train.global_batch=3", expect=2)
    assert (
        "train.global_batch: 4 -> 3" in refused and "write train.batch_may_change=true" in refused
    )
    changed = ("train.batch_may_change=true", "train.global_batch=3")
    said = train("run", *changed, "train.stop_after=4")
    assert "a batch has 3 sequences from here on, and had 4; reading goes on behind the 8" in said
    # A resume with that batch, and one with another again.
    train("run", *changed, "train.stop_after=5")
    train("run", "train.batch_may_change=true", "train.global_batch=2")
    expected = {1: mean(1, 4), 2: mean(5, 8), 3: mean(9, 11), 4: mean(12, 14), 5: mean(15, 17)}
    losses = losses_of(tmp_path / "runs" / "run")
    assert losses == pytest.approx({**expected, 6: mean(18, 19)}, rel=1e-5)
    manifest = tmp_path / "runs" / "run" / "checkpoints" / "step-00000006" / "manifest.json"
    found = json.loads(manifest.read_text())
    assert found["position"] * found["global_batch"] + found["shift"] == 19
