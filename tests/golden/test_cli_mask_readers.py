"""A family that reads attention masks itself, and an attention whose masks are no tensors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

DOGE = {
    **{"model_type": "doge", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 300},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("attention", ["flash_attention_4", "flex_attention"])
def test_it_is_refused_before_a_rank_starts(
    attention: str, shardwise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(DOGE))
    model = "model: {name: model, weights: random}"
    Path("run.yaml").write_text(
        f"name: run\ncluster: 1xCPU\n{model}\ndata: {{source: synthetic, seq_len: 16}}\n"
        "train: {steps: 1, global_batch: 1}\n"
    )
    said = shardwise("train", "run.yaml", f"model.attention={attention}", expect=2).stderr
    assert f"doge models do not run with model.attention={attention}" in said
    assert "reads attention masks itself" in said
    assert "fix: leave model.attention out" in said
    assert not Path("runs").exists()
    shardwise("train", "run.yaml", "model.attention=eager")
