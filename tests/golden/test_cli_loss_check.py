"""`shardwise train` compares its loss with the model's own before the first step."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist
Run = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = """\
cluster: 2xCPU
data: {source: synthetic, seq_len: 16}
precision: {param: fp32}
train: {steps: 2, global_batch: 4}
observe: {log_every: 1}
checkpoint: {at_end: false}
"""
# A model of a user, whose loss has one more term: it keeps logits small.
CODE = {
    "own_config.py": """\
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "own_model.py": """\
from transformers import LlamaForCausalLM
from .own_config import OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 0.01 * output.logits.logsumexp(-1).square().mean()
        return output
""",
}
SHAPE: dict[str, Any] = {
    "model_type": "own",
    "auto_map": {
        "AutoConfig": "own_config.OwnConfig",
        "AutoModelForCausalLM": "own_model.OwnModel",
    },
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 2},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def figures(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The bits of each step."""
    return [(e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"]


def test_a_run_says_both_losses_before_its_first_step(home: Path, shardwise: Run) -> None:
    done = shardwise("train", str(home / "run.yaml"), f"runs_dir={home}", "model=tiny-llama")
    lines = done.stdout.splitlines()
    (said,) = (index for index, line in enumerate(lines) if line.startswith("loss check: "))
    (stepped,) = (index for index, line in enumerate(lines) if line.startswith("step 1/2"))
    assert said < stepped
    checked = events_of(home / "run")
    kinds = [event["event"] for event in checked]
    assert kinds.index("start") < kinds.index("loss_check") < kinds.index("step")
    words = (f"runs_dir={home}", "name=unchecked", "train.check_loss=false")
    shardwise("train", str(home / "run.yaml"), "model=tiny-llama", *words)
    unchecked = events_of(home / "unchecked")
    assert "loss_check" not in [event["event"] for event in unchecked]
    assert figures(checked) == figures(unchecked), "the check has left something behind"


def test_a_term_that_is_not_trained_is_refused(
    home: Path, shardwise: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(home / "modules"))
    (home / "own").mkdir()
    (home / "own" / "config.json").write_text(json.dumps(SHAPE))
    for name, code in CODE.items():
        (home / "own" / name).write_text(code)
    words = ("train", str(home / "run.yaml"), f"runs_dir={home}")
    own = (f"model.name={home / 'own'}", "model.trust_remote_code=true")
    done = shardwise(*words, *own, expect=2)
    assert done.stderr.count("error:") == 1
    assert "the loss here is 5.7" in done.stderr and "OwnModel.forward" in done.stderr
    assert "it is not the cross-entropy of its logits" in done.stderr
    assert "train.check_loss=false" in done.stderr
    assert list((home / "modules" / "transformers_modules" / "own").iterdir())
    assert not any(event["event"] == "step" for event in events_of(home / "run"))
    trained = shardwise(*words, *own, "train.check_loss=false")
    assert "finished 2 steps" in trained.stdout and "loss check" not in trained.stdout
