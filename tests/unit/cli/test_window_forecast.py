"""What a sliding window does to a forecast, as `shardwise plan` prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app

RUN = """
model: {model}
data: {{source: synthetic, seq_len: 16384}}
cluster: 8xH200
train: {{micro_batch: 1, global_batch: 8}}
memory: {{checkpoint_activations: selective}}
"""


def forecast(directory: Path, model: str, *overrides: str) -> dict[str, Any]:
    file = directory / "run.yaml"
    file.write_text(RUN.format(model=model))
    done = CliRunner().invoke(app, ["plan", str(file), *overrides, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)["forecast"]
    return found


@pytest.fixture(autouse=True)
def _without_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def test_a_windowed_model_is_faster_than_the_same_without(tmp_path: Path) -> None:
    known = "model.attention=flash_attention_4"
    windowed = forecast(tmp_path, "mistral-7b", known)
    without = forecast(tmp_path, "mistral-7b", known, "model.overrides.sliding_window=null")
    # 3.6k tokens are seen instead of 8.2k, by a third of what the model computes.
    assert windowed["tokens_per_s"] > 1.1 * without["tokens_per_s"]
    # It computes less, so its share of the peak is about the same.
    assert windowed["mfu"] == pytest.approx(without["mfu"], rel=0.05)


@pytest.mark.parametrize("model", ["mistral-7b", "gemma-3-12b"])
def test_a_mask_costs_more_than_a_window_saves(tmp_path: Path, model: str) -> None:
    """torch's attention computes what it is told to mask."""
    masked, known = (
        forecast(tmp_path, model, f"model.attention={name}")["tokens_per_s"]
        for name in ("sdpa", "flash_attention_4")
    )
    assert masked < 0.8 * known
