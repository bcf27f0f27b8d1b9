"""Runs over a frozen pretrained model, through the command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.facts.presets import PRESETS

Run = Callable[..., subprocess.CompletedProcess[str]]
CONFIG = """\
model: MODEL
adapter: ADAPTER
data: {source: synthetic, seq_len: 32}
cluster: 2xCPU
shard: {strategy: full_shard}
optim: {lr: 1e-2}
train: {steps: 4, global_batch: 4}
checkpoint: {asynchronous: false}
observe: {log_every: 1}
"""


def make_home(home: Path, adapter: str, hidden_size: int) -> Path:
    """A pretrained model in bf16, and a configuration that trains adapters over it."""
    shape = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    shape |= {"num_hidden_layers": 2, "vocab_size": 300}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**PRESETS["tiny-llama"], **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(home / "base")
    text = CONFIG.replace("MODEL", str(home / "base")).replace("ADAPTER", adapter)
    (home / "run.yaml").write_text(text)
    return home


def train(shardwise: Run, home: Path, name: str, *words: str, **how: Any) -> Any:
    return shardwise(
        "train", str(home / "run.yaml"), f"runs_dir={home}", f"name={name}", *words, **how
    )
