"""Odd but legal sizes through the real command: they train, resume and export like any other."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

SHAPE: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 300},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": 300}
MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 3},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
BERT = {
    **{"model_type": "bert", "is_decoder": True, "vocab_size": 5, "hidden_size": 16},
    **{"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24},
}


def preset(name: str, shape: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"name": name, "overrides": {**shape, **changed}}


ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one layer": (preset("tiny-llama", SHAPE, num_hidden_layers=1), {}),
    "one layer, three tokens, tied, more ranks than rows": (
        preset("tiny-llama", SHAPE, num_hidden_layers=1, vocab_size=3, tie_word_embeddings=True),
        {"cluster": "5xCPU", "shard": {"strategy": "full_shard"}, "train": {"global_batch": 5}},
    ),
    "one token": (preset("tiny-llama", SHAPE, vocab_size=1), {"memory": {"loss": "chunked"}}),
    "two tokens in a sequence": (
        preset("tiny-llama", SHAPE),
        {"data": {"seq_len": 2}, "cluster": "1xCPU"},
    ),
    "two positions": (
        preset("tiny-gpt2", GPT2, n_positions=2),
        {"data": {"seq_len": 2}, "cluster": "1xCPU"},
    ),
    "one layer of a family that is counted": (MOE, {}),
    "one layer of a family that declares no blocks": (BERT, {}),
}


# The other one has more than one of these oddities, and other tests train such families.
PLAINER = ("one layer", "one token", "two tokens in a sequence", "two positions")
PLAINER += ("one layer of a family that is counted",)
PLAINER += ("one layer of a family that declares no blocks",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in PLAINER)) for name in ODD]
)
def test_odd_sizes_train(
    name: str,
    shardwise: Run,
    losses_of: Callable[[Path], dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model, settings = ODD[name]
    if "model_type" in model:
        Path("model").mkdir()
        Path("model/config.json").write_text(json.dumps(model))
        model = {"name": "model"}
    config = {"name": "run", "cluster": "2xCPU", "checkpoint": {"every": 2}, **settings}
    config["model"] = {**model, "weights": "random"}
    config["data"] = {"source": "synthetic", "seq_len": 16, **settings.get("data", {})}
    config["train"] = {"steps": 3, "global_batch": 4, **settings.get("train", {})}
    Path("run.json").write_text(json.dumps(config))
    shardwise("train", "run.json", "train.stop_after=2")
    shardwise("train", "run.json")
    losses = losses_of(Path("runs/run"))
    assert list(losses) == [1, 2, 3]
    assert all(math.isfinite(loss) for loss in losses.values())
    shardwise("export", "runs/run", "--to", "out")
    assert Path("out/model.safetensors").is_file()


def test_sizes_that_a_counted_family_cannot_compute_are_refused_before_a_rank_starts(
    shardwise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    sizes = {**MOE, "num_hidden_layers": 2, "vocab_size": 300, "num_key_value_heads": 3}
    Path("model/config.json").write_text(json.dumps(sizes))
    words = ("model.name=model", "model.weights=random", "data.source=synthetic")
    Path("run.yaml").write_text("name: run\ncluster: 2xCPU\ndata: {seq_len: 16}\n")
    said = shardwise("train", "run.yaml", *words, expect=2).stderr
    assert "transformers cannot run a qwen3_moe model of these sizes" in said
    assert "fix: mend config.json or model.overrides" in said
    assert not list(Path("runs").rglob("rank-*.log"))
