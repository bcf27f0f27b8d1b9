"""`shardwise train` with sequences that ranks divide: to a checkpoint, and on with whole ones."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}
data: {source: jsonl, path: RECORDS, seq_len: 64, document_mask: true, eval_fraction: 0.2}
cluster: 2xCPU
precision: {param: fp32}
train: {steps: 4, global_batch: 8, micro_batch: 2, eval_every: 2}
observe: {log_every: 1}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("context")
    records = [json.dumps({"text": f"{n} and {n} make {2 * n}. " * (1 + n % 4)}) for n in range(99)]
    (home / "records.jsonl").write_text("\n".join(records) + "\n")
    (home / "run.yaml").write_text(CONFIG.replace("RECORDS", str(home / "records.jsonl")))
    return home


def train(home: Path, name: str, shardwise: Run, *words: str, **how: Any) -> Any:
    place = (str(home / "run.yaml"), f"runs_dir={home}", f"name={name}")
    return shardwise("train", *place, *words, **how)


def losses_of(run_dir: Path, kind: str) -> dict[int, float]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in events if event["event"] == kind}


def test_divided_and_whole_sequences_take_turns(home: Path, shardwise: Run) -> None:
    train(home, "whole", shardwise)
    done = train(home, "divided", shardwise, "mesh.context=2", "train.stop_after=2")
    assert "loss check: " in done.stdout
    plan = json.loads((home / "divided" / "plan.json").read_text())
    assert plan["choices"]["context"] == {"value": 2, "why": "given", "source": "user"}
    train(home, "divided", shardwise)
    for kind in ("step", "eval"):
        expected, found = (losses_of(home / name, kind) for name in ("whole", "divided"))
        assert len(expected) >= 3
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_family_that_cannot_be_divided_starts_no_rank(home: Path, shardwise: Run) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300, "head_dim": 8}
    AutoConfig.for_model("stablelm", num_attention_heads=4, **sizes).save_pretrained(home / "other")
    words = (f"model.name={home / 'other'}", "model.overrides={}", "mesh.context=2")
    done = train(home, "refused", shardwise, *words, expect=2)
    assert "ranks cannot divide the sequences of stablelm models" in done.stderr
    assert "write mesh.context=1" in done.stderr
    assert not (home / "refused" / "events.jsonl").exists()
