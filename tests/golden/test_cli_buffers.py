"""The real command on directories whose tensors are not all parameters, or not all the model's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

# At this rate AdamW moves no fp32 weight by a bit, so that what comes out is what went in.
CONFIG = """\
data: {source: synthetic, seq_len: 16}
shard: {strategy: full_shard}
precision: {param: fp32}
optim: {lr: 1e-30, weight_decay: 0.0}
train: {steps: 2, global_batch: 4}
"""
SHAPE: dict[str, Any] = {
    "model_type": "dots1",
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 66,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and `base`: a mixture of experts whose router's correction was trained."""
    home = tmp_path_factory.mktemp("buffers")
    (home / "run.yaml").write_text(CONFIG)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    model.get_buffer(BUFFER).copy_(torch.tensor([0.5, -0.25, 0.125, 1.0]))
    model.save_pretrained(home / "base")
    return home


def words(home: Path, name: str, model: str, *more: str) -> tuple[str, ...]:
    common = (f"runs_dir={home}", f"name={name}", f"model.name={home / model}")
    return ("train", str(home / "run.yaml"), *common, *more)


def changed(home: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """A copy of `base` with other tensors in its file."""
    shutil.copytree(home / "base", home / name)
    weights = home / name / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    return name


def test_persistent_buffers_are_read_trained_with_and_exported(home: Path, shardwise: Run) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mtp.weight"] = torch.ones(3)

    name = changed(home, "extra", add)
    done = shardwise(*words(home, "refused", name, "cluster.name=1xCPU"), expect=2)
    assert "1 tensors in" in done.stderr
    assert "model.layers.2.mtp.weight" in done.stderr
    assert "Traceback" not in done.stderr
    fix = r"model.ignore_weights=[^model\.layers\.2]"
    assert fix in "".join(done.stderr.split()).replace("'", "")
    shardwise(*words(home, "whole", name, fix, "cluster.name=2xCPU", "train.stop_after=1"))
    shardwise(*words(home, "whole", name, fix, "cluster.name=1xCPU"))
    shardwise("export", str(home / "whole"), "--to", str(home / "out"))
    found, given = (load_file(home / d / "model.safetensors") for d in ("out", "base"))
    assert torch.equal(found[BUFFER], torch.tensor([0.5, -0.25, 0.125, 1.0]))
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_a_buffer_that_nothing_fills_is_an_error(home: Path, shardwise: Run) -> None:
    name = changed(home, "without", lambda tensors: tensors.pop(BUFFER))
    done = shardwise(*words(home, "without-1", name, "cluster.name=1xCPU"), expect=2)
    assert "1 tensors of the model are not in" in done.stderr
    assert BUFFER in done.stderr
