"""Adam's moments in host memory through the command: the same bits, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1}}
data: {source: text, path: some.txt, seq_len: 64}
cluster: 2xCPU
shard: {strategy: full_shard}
precision: {param: fp32}
train: {steps: 3, global_batch: 4}
optim: {lr: 3e-3}
observe: {log_every: 1}
"""


def test_paged_moments_change_no_bit(
    shardwise: Run, tmp_path: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "some.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(400)))

    def train(name: str, *words: str) -> Any:
        return shardwise("train", "run.yaml", f"name={name}", *words, cwd=tmp_path)

    train("plain")
    train("paged", "memory.offload_optimizer=true", "train.stop_after=2")
    train("paged", "memory.offload_optimizer=true")
    losses = losses_of(tmp_path / "runs" / "plain")
    assert losses_of(tmp_path / "runs" / "paged") == losses and losses[3] < losses[1]
    # A checkpoint does not say where moments were.
    assert "resumed at step 3" in train("paged", "train.steps=4").stdout
