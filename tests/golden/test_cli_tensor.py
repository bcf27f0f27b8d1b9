"""Tensor parallelism through the real command: train, go on with another mesh, export."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
model:
  name: tiny-mixtral
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, vocab_size: 301}
data: {source: synthetic, seq_len: 32, eval_fraction: 0.1, eval_sequences: 4}
cluster: 2xCPU
mesh: {tensor: 2}
train: {steps: 4, global_batch: 8, accumulation: 1, eval_every: 2, router_aux_loss: 0.1}
precision: {param: fp32}
checkpoint: {every: 2, asynchronous: false}
observe: {log_every: 1}
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, shardwise: Run) -> Path:
    """A run on two ranks that compute together, which ended after step 2 of 4."""
    home = tmp_path_factory.mktemp("tensor")
    (home / "run.yaml").write_text(CONFIG)
    train(home, "stopped", shardwise, "train.stop_after=2")
    return home / "stopped"


def train(home: Path, name: str, shardwise: Run, *words: str) -> str:
    given = (f"runs_dir={home}", f"name={name}", *words)
    return shardwise("train", str(home / "run.yaml"), *given).stdout


def seen(run: Path) -> list[float]:
    """Losses, norms and held-out losses, in order."""
    events: list[dict[str, Any]] = [
        json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()
    ]
    kept = [event for event in events if event["event"] in ("step", "eval")]
    return [event[name] for event in kept for name in ("loss", "grad_norm") if name in event]


def exported(run: Path, shardwise: Run) -> dict[str, torch.Tensor]:
    shardwise("export", str(run), "--to", str(run / "out"))
    return load_file(run / "out" / "model.safetensors")


def test_a_run_goes_on_with_another_mesh(stopped: Path, shardwise: Run) -> None:
    home, runs = stopped.parent, {}
    for name, words in (
        ("same", ()),
        ("sharded", ("mesh.tensor=1", "shard.strategy=full_shard")),
    ):
        runs[name] = Path(shutil.copytree(stopped, home / name))
        train(home, name, shardwise, *words)
    plan = json.loads((runs["same"] / "plan.json").read_text())["choices"]
    assert plan["tensor"] == {"value": 2, "why": "given", "source": "user"}
    assert plan["sequence_parallel"]["value"] is True
    same, sharded = (seen(run) for run in runs.values())
    # Of steps two numbers each, and held-out losses before the first, and after 2 and 4.
    assert len(same) == 2 * 4 + 3
    assert sharded == pytest.approx(same, rel=1e-5)
    # Everything before the other mesh is the same file.
    assert sharded[: len(seen(stopped))] == seen(stopped)
    first, second = (exported(run, shardwise) for run in runs.values())
    assert first.keys() == second.keys() and len(first) > 20
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=1e-4, atol=1e-6), name


def test_a_family_that_cannot_be_divided_is_refused(stopped: Path, shardwise: Run) -> None:
    words = ("plan", str(stopped.parent / "run.yaml"), "model=tiny-gpt2")
    said = shardwise(*words, expect=2).stderr
    assert "mesh.tensor=2 does not suit this run" in said
    assert "how to divide gpt2 models is not known" in said
    assert "write mesh.tensor=1" in said
