"""Adam's moments in eight bits through the command, the same after a resume."""

from __future__ import annotations

import json
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
train: {steps: 4, global_batch: 4}
optim: {lr: 3e-3, state: int8}
observe: {log_every: 1}
"""


def test_eight_bits_are_saved_and_resumed(
    shardwise: Run, tmp_path: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "some.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(400)))

    def train(name: str, *words: str) -> Any:
        return shardwise("train", "run.yaml", f"name={name}", *words, cwd=tmp_path)

    train("whole")
    train("parts", "train.stop_after=2")
    train("parts")
    losses = losses_of(tmp_path / "runs" / "whole")
    assert losses_of(tmp_path / "runs" / "parts") == losses and losses[4] < losses[1]
    said = shardwise("checkpoint", "verify", "runs/whole", cwd=tmp_path).stdout
    assert "1 verified, 0 damaged" in said
    files = (tmp_path / "runs" / "whole").rglob("rank-*.bin")
    plan = json.loads((tmp_path / "runs" / "whole" / "plan.json").read_text())
    params = plan["model"]["total_params"]
    # 4 bytes of a parameter, 2 of its moments and their scales; 12 without codes.
    assert 6 < sum(file.stat().st_size for file in files) / params < 6.6
    more = ("train.steps=5", "cluster=1xCPU", "shard.strategy=no_shard")
    assert "resumed at step 4" in train("whole", *more).stdout
