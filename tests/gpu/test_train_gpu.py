"""Training on a real GPU through the command: what resumes goes on as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device: nothing here was tested"
)

CONFIG = """\
model: {name: llama-3.2-1b, attention: sdpa, overrides: {num_hidden_layers: 2, vocab_size: 4096,
  hidden_size: 512, num_attention_heads: 8, num_key_value_heads: 2, intermediate_size: 2048}}
data: {source: stdlib, seq_len: 512, tokenizer: byte}
train: {micro_batch: 2, steps: 6}
optim: {lr: 1e-3, warmup_steps: 0, schedule: constant}
memory: {compile: false}
checkpoint: {every: 3}
observe: {log_every: 1}
"""


def train(folder: Path, name: str, *changes: str) -> list[float]:
    """The losses of all steps that the run directory knows of."""
    return [step["loss"] for step in steps_of(folder, name, *changes)]


def steps_of(folder: Path, name: str, *changes: str) -> list[dict[str, Any]]:
    """Train, and read what the run directory knows of each step."""
    words = [f"runs_dir={folder}", f"name={name}", *changes]
    command = [sys.executable, "-m", "shardwise", "train", str(folder / "run.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "step"]


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    whole = train(tmp_path, "whole")
    assert len(whole) == 6 and whole[-1] < whole[0]
    # Attention on a GPU adds up its gradients in any order; Adam without its state would show.
    alike = pytest.approx(whole, rel=1e-4)
    assert [*train(tmp_path, "stopped", "train.steps=3"), *whole[3:]] == alike
    assert train(tmp_path, "stopped") == alike


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_our_kernels_train_to_the_same_losses(tmp_path: Path, compiled: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    torchs, ours = (
        train(tmp_path, name, f"memory.compile={compiled}", f"train.kernels={name}")
        for name in ("torch", "own")
    )
    assert ours[0] == pytest.approx(torchs[0], rel=1e-3)
    assert ours == pytest.approx(torchs, rel=1e-2)


def test_flash_attention_4_trains_to_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    (tmp_path / "run.yaml").write_text(CONFIG)
    usual = train(tmp_path, "usual", "memory.compile=true")
    other = train(tmp_path, "other", "memory.compile=true", "model.attention=flash_attention_4")
    # The first differs by rounding in bf16 alone; later ones by what updates made of it.
    assert other[0] == pytest.approx(usual[0], rel=1e-3)
    assert other == pytest.approx(usual, rel=1e-2)


def test_activations_that_wait_in_host_memory_free_the_device(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = ("memory.compile=true", "train.micro_batch=8", "model.overrides.num_hidden_layers=12")
    words += ("memory.checkpoint_activations=none",)
    usual = steps_of(tmp_path, "usual", *words)
    waiting = steps_of(tmp_path, "waiting", *words, "memory.offload_activations=0.75")
    losses = [[step["loss"] for step in steps] for steps in (usual, waiting)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    held = [steps[-1]["memory"]["allocated"] for steps in (usual, waiting)]
    # Of 12 blocks nine travel; the plan knows what each of them keeps.
    plans = [
        json.loads((tmp_path / name / "plan.json").read_text())["memory"]["activations"]
        for name in ("usual", "waiting")
    ]
    assert held[0] - held[1] == pytest.approx(plans[0] - plans[1], rel=0.3)
