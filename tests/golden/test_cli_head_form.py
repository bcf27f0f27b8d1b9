"""`shardwise train` of heads that scale or cap logits: in slices, with the model's own loss."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist
Run = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], dict[int, float]]

CONFIG = """\
cluster: 2xCPU
data: {source: synthetic, seq_len: 16}
precision: {param: fp32}
train: {steps: 3, global_batch: 4}
memory: {loss_chunk_tokens: 7}
observe: {log_every: 1}
checkpoint: {at_end: false}
"""
SHAPE: dict[str, Any] = {
    **{"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"logit_scale": 9.0},
    "gemma2": {"final_logit_softcapping": 0.1},
}
OPT = {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
WHOLE = "its forward does not pass through its base model and its head"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def made(home: Path, config: dict[str, Any]) -> tuple[str, ...]:
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(config))
    return (str(home / "run.yaml"), f"model.name={home / 'model'}", f"runs_dir={home}")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "gemma2")) for name in FAMILIES],
)
def test_a_scaled_or_capped_head_trains_in_slices(
    family: str, home: Path, shardwise: Run, losses_of: Losses
) -> None:
    words = made(home, {"model_type": family, **SHAPE, **FAMILIES[family]})
    done = shardwise("train", *words, "name=chunked")
    assert "loss check: " in done.stdout and "all logits at once, because" not in done.stdout
    plan = json.loads((home / "chunked" / "plan.json").read_text())
    assert plan["choices"]["loss"]["value"] == "chunked"
    shardwise("train", *words, "name=full", "memory.loss=full")
    chunked, full = losses_of(home / "chunked"), losses_of(home / "full")
    assert list(chunked) == [1, 2, 3]
    assert chunked == pytest.approx(full, rel=1e-5)


def test_a_plan_says_why_a_loss_needs_all_logits(home: Path, shardwise: Run) -> None:
    words = made(home, {"model_type": "opt", **OPT})
    said = " ".join(shardwise("plan", *words).stdout.split())
    assert f" loss full rule not chunked: {WHOLE} " in said
    done = shardwise("train", *words)
    assert "finished 3 steps" in done.stdout
    refused = shardwise("train", *words, "name=asked", "memory.loss=chunked", expect=2)
    assert "memory.loss=chunked does not give this model's loss" in refused.stderr
    assert WHOLE in refused.stderr
