"""Two sites through the real command: a stop, a resume, and a checkpoint that others read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}
data: {source: stdlib, seq_len: 32, eval_fraction: 0.01, eval_sequences: 8}
cluster: {name: 2xCPU, datacenters: 2, site_link: 0.1}
diloco: {steps: 2, fragments: 2, exchange: int8}
train: {steps: 4, global_batch: 8, eval_every: 2}
checkpoint: {every: 0}
observe: {log_every: 1}
"""


def test_two_sites_stop_go_on_and_leave_a_model(tmp_path: Path, shardwise: Run) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    place = (f"runs_dir={tmp_path}", "name=sites")
    begun = shardwise("train", str(file), *place, "train.stop_after=2").stdout
    assert "mesh site=2 x replicate=1 x shard=1" in " ".join(begun.split())
    assert "outer step after step 1, " in begun and "outer step after step 2, " in begun
    resumed = shardwise("train", str(file), *place).stdout
    assert "resumed at step 2" in resumed and "finished 4 steps" in resumed
    lines = (tmp_path / "sites" / "events.jsonl").read_text().splitlines()
    found = [each for each in map(json.loads, lines) if each["event"] == "outer_step"]
    assert [(each["step"], each["fragment"]) for each in found] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert all(each["norm"] > 0 and each["waited_s"] > 0 for each in found)
    plan = json.loads((tmp_path / "sites" / "plan.json").read_text())
    sent = sum(each["sent_bytes"] for each in found[:2])
    # Each fragment is filled up to whole blocks of the format.
    assert 0 <= sent - plan["outlook"]["bytes_per_rank"] < 2 * (256 + 4)
    assert "good" in shardwise("checkpoint", "verify", str(tmp_path / "sites")).stdout
    shardwise("export", str(tmp_path / "sites"), "--to", str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "model.safetensors").is_file()
