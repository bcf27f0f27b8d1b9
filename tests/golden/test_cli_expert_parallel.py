"""`mesh.expert` through the command: the losses of a run without it, a resume on another mesh, and
the same exported weights."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

Run = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 4
SETTINGS = [
    "cluster=2xCPU",
    "data.source=synthetic",
    "data.seq_len=16",
    "precision.param=fp32",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.router_aux_loss=0.1",
    "observe.log_every=1",
]
DEALT = {
    "dealt": ("mesh.shard=2", "mesh.expert=2"),
    "four axes": (
        *("cluster=8xCPU", "mesh.shard=2", "mesh.context=2", "mesh.tensor=2", "mesh.expert=4"),
    ),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=301,
        num_experts=8,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "mixture")
    return folder


def train(shardwise: Run, home: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Start or resume the run `name`; all its steps so far."""
    file = home / f"{name}.yaml"
    file.write_text(f"model: {home / 'mixture'}\n")
    shardwise("train", str(file), f"runs_dir={home}", *SETTINGS, *words)
    lines = (home / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["dealt", pytest.param("four axes", marks=pytest.mark.long)])
def test_dealt_out_experts_learn_resume_and_leave_as_all_others(
    home: Path, shardwise: Run, name: str
) -> None:
    whole = train(shardwise, home, f"whole beside {name}")
    dealt = train(shardwise, home, name, *DEALT[name], "train.stop_after=2")
    assert len(dealt) == 2
    # Two ranks have all experts now, as if it had been so from the first step on.
    dealt = train(shardwise, home, name)
    assert [event["step"] for event in dealt] == list(range(1, STEPS + 1))
    for kind in ("loss", "grad_norm", "aux_loss"):
        found = [event[kind] for event in dealt]
        assert found == pytest.approx([event[kind] for event in whole], rel=1e-5), kind
    assert dealt[0]["experts"] == pytest.approx(whole[0]["experts"])
    runs = (f"whole beside {name}", name)
    for run in runs:
        shardwise("export", str(home / run), "--to", str(home / f"of-{run}"), "--dtype", "fp32")
    expected, last = (load_file(home / f"of-{run}" / "model.safetensors") for run in runs)
    assert last.keys() == expected.keys()
    assert any("experts" in key for key in last)
    for key, tensor in last.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_tunnel_sends_tokens_to_experts(tmp_path: Path, shardwise: Run) -> None:
    """For each of four blocks rows, their weights and what was made of them, and the same back."""
    (tmp_path / "run.yaml").write_text(
        "model: tiny-mixtral\ndata: {source: synthetic, seq_len: 64}\nmesh: {shard: 8}\n"
    )
    words = ("--cluster", "8xH100", "--device", "fake", "mesh.expert=2")
    said = shardwise("tunnel", str(tmp_path / "run.yaml"), *words, f"runs_dir={tmp_path}").stdout
    rows = [line.split() for line in said.splitlines() if line.split()[:1] == ["all_to_all"]]
    assert [row[:4] for row in rows] == [["all_to_all", "expert", "2", "24"]]


def test_experts_that_were_not_compared_are_refused(tmp_path: Path, shardwise: Run) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, num_experts=8, hidden_size=64)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path}\ncluster: 4xCPU\n")
    words = ("data.source=synthetic", "model.weights=random", "mesh.expert=2")
    done = shardwise("plan", str(tmp_path / "run.yaml"), *words, expect=2)
    assert "mesh.expert=2 does not suit qwen3_next models" in " ".join(done.stderr.split())


def test_what_does_not_go_together_is_refused(tmp_path: Path, shardwise: Run) -> None:
    word = "shard.reshard_after_forward=2"
    (tmp_path / "run.yaml").write_text("model: tiny-mixtral\ncluster: 4xCPU\n")
    done = shardwise("plan", str(tmp_path / "run.yaml"), "mesh.expert=2", word, expect=2)
    assert f"mesh.expert=2 does not work with {word}" in " ".join(done.stderr.split())
