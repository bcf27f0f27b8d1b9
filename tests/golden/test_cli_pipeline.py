"""`shardwise train` with stages: to a checkpoint, on with whole models, and exported."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, vocab_size: 259,
              tie_word_embeddings: true}
data: {source: jsonl, path: RECORDS, seq_len: 64, document_mask: true, eval_fraction: 0.2}
cluster: 2xCPU
precision: {param: fp32}
optim: {clip_norm: 0.5}
train: {steps: 4, global_batch: 8, micro_batch: 2, eval_every: 2}
observe: {log_every: 1}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pipeline")
    records = [json.dumps({"text": f"{n} and {n} make {2 * n}. " * (1 + n % 4)}) for n in range(99)]
    (home / "records.jsonl").write_text("\n".join(records) + "\n")
    (home / "run.yaml").write_text(CONFIG.replace("RECORDS", str(home / "records.jsonl")))
    return home


def train(home: Path, name: str, shardwise: Run, *words: str, **how: Any) -> Any:
    place = (str(home / "run.yaml"), f"runs_dir={home}", f"name={name}")
    return shardwise("train", *place, *words, **how)


def events_of(run_dir: Path, kind: str) -> list[Any]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def test_divided_stages_and_a_whole_model_take_turns(home: Path, shardwise: Run) -> None:
    train(home, "whole", shardwise)
    stages = ("cluster=4xCPU", "mesh.pipeline=2", "mesh.tensor=2")
    done = train(home, "staged", shardwise, *stages, "train.stop_after=2")
    said = " ".join(done.stdout.split())
    assert "mesh replicate=1 x pipeline=2 x shard=1 x tensor=2" in said
    train(home, "staged", shardwise)
    for kind, names in (("step", ("loss", "grad_norm")), ("eval", ("loss",))):
        for name in names:
            expected, found = (
                {event["step"]: event[name] for event in events_of(home / run, kind)}
                for run in ("whole", "staged")
            )
            assert len(expected) >= 3
            assert found == pytest.approx(expected, rel=1e-5)
    for run in ("whole", "staged"):
        shardwise("export", str(home / run), "--to", str(home / f"{run}-out"))
    bubbles = [event["bubble"] for event in events_of(home / "staged", "pipeline")]
    assert len(bubbles) == 2 and all(0 < bubble < 1 for bubble in bubbles)
    whole, staged = (
        load_file(home / f"{run}-out" / "model.safetensors") for run in ("whole", "staged")
    )
    assert whole.keys() == staged.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(staged[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_pretrained_weights_go_to_their_stages(home: Path, shardwise: Run) -> None:
    shardwise("export", str(home / "whole"), "--to", str(home / "source"))
    # The tied table under its other name, which only the last stage has a module for.
    shutil.copytree(home / "source", home / "renamed")
    tensors = load_file(home / "source" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, home / "renamed" / "model.safetensors", {"format": "pt"})
    staged = ("again-staged", "renamed", ("mesh.pipeline=2",))
    for name, source, words in (("again", "source", ()), staged):
        place = (f"model.name={home / source}", "model.overrides={}", "train.steps=1")
        train(home, name, shardwise, *place, *words)
    expected, found = (
        [event["loss"] for event in events_of(home / run, "eval")]
        for run in ("again", "again-staged")
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_tunnel_has_no_other_stages(home: Path, shardwise: Run) -> None:
    done = shardwise("tunnel", str(home / "run.yaml"), "mesh.pipeline=2", expect=2)
    assert "the tunnel cannot run mesh.pipeline=2" in done.stderr
