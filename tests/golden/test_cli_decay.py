"""`optim.decay_embeddings` through the real command line: rows of tokens that no text has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

Run = Callable[..., subprocess.CompletedProcess[str]]

NUM_BYTES = 257  # and the vocabulary of the preset has more rows
CONFIG = """\
model: tiny-llama
data: {seq_len: 32, tokenizer: byte, source: text, path: TEXT}
cluster: 2xCPU
shard: {strategy: full_shard}
precision: {param: fp32}
optim: {lr: 0.01, weight_decay: 0.5, schedule: constant}
train: {steps: 2, global_batch: 4}
"""


@pytest.mark.dist
def test_rows_without_a_gradient_shrink_only_where_embeddings_decay(
    tmp_path: Path, shardwise: Run
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("so much depends upon a red wheel barrow\n" * 50)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("TEXT", str(text)))

    def weights(word: str) -> dict[str, torch.Tensor]:
        run, out = tmp_path / f"decay-{word}", tmp_path / f"{word}-out"
        words = (f"name={run.name}", f"runs_dir={tmp_path}", f"optim.decay_embeddings={word}")
        shardwise("train", str(tmp_path / "run.yaml"), *words)
        choice = json.loads((run / "plan.json").read_text())["choices"]["decay_embeddings"]
        assert choice["value"] is (word == "true")
        assert choice["source"] == ("rule" if word == "true" else "user")
        shardwise("export", str(run), "--to", str(out), "--dtype", "fp32")
        return load_file(out / "model.safetensors")

    decayed, kept = (weights(word) for word in ("true", "false"))
    name = "model.embed_tokens.weight"
    rows, unseen = decayed[name][NUM_BYTES:], kept[name][NUM_BYTES:]
    assert unseen.abs().min() > 0
    torch.testing.assert_close(rows, unseen * (1 - 0.01 * 0.5) ** 2, rtol=1e-6, atol=0)
    # The head is not tied: it decays either way, and has the same gradient in the first step.
    torch.testing.assert_close(decayed["lm_head.weight"], kept["lm_head.weight"], rtol=0, atol=1e-3)
