"""The real command on checkpoints of other tools: bit by bit, or refused with nothing run."""

from __future__ import annotations

import os
import pickle
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from zero_files import save_zero

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
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Trap:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config directory, and beside it `checkpoint-7` as the HF Trainer writes it for FSDP."""
    home = tmp_path_factory.mktemp("import")
    (home / "run.yaml").write_text(CONFIG)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    model.config.save_pretrained(home / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        place = home / "checkpoint-7" / "pytorch_model_fsdp_0"
        dcp.save({"model": model.state_dict()}, checkpoint_id=place, no_dist=True)
    (home / "checkpoint-7" / "optimizer_0").mkdir()
    torch.save(model.state_dict(), home / "expected.pt")
    return home


def expected(home: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(home / "expected.pt", weights_only=True)
    return state


def train(
    shardwise: Run, home: Path, name: str, weights: Path, cluster: str = "2xCPU", **how: Any
) -> Any:
    words = (f"runs_dir={home}", f"name={name}", f"model.name={home / 'base'}")
    words += (f"model.weights_from={weights}", f"cluster.name={cluster}")
    return shardwise("train", str(home / "run.yaml"), *words, **how)


def test_accelerates_shards_are_trained_on(home: Path, shardwise: Run) -> None:
    checkpoint = home / "checkpoint-7"
    done = train(shardwise, home, "sharded", checkpoint)
    assert f"of weights from {checkpoint}/pytorch_model_fsdp_0/.metadata" in done.stdout
    assert "not read: optimizer_0; the optimizer and the schedule start anew" in done.stdout
    assert "finished 2 steps" in done.stdout
    shardwise("export", str(home / "sharded"), "--to", str(home / "out"))
    found = load_file(home / "out" / "model.safetensors")
    for name, tensor in expected(home).items():
        assert torch.equal(found[name], tensor), name


def test_shards_of_deepspeed_are_trained_on(home: Path, shardwise: Run, tmp_path: Path) -> None:
    weights = expected(home)
    groups = [{n: t for n, t in weights.items() if (t.dim() > 1) is wide} for wide in (True, False)]
    save_zero(tmp_path, groups, stage=3, num_ranks=3)
    done = train(shardwise, home, "zero", tmp_path)
    assert f"of weights from {tmp_path}/global_step7/zero_pp_rank_0" in done.stdout
    assert "not read: the optimizer and scheduler of DeepSpeed; the optimizer" in done.stdout
    shardwise("export", str(home / "zero"), "--to", str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert not (tmp_path / "canary").exists()


def test_a_hostile_checkpoint_is_an_error_and_runs_nothing(
    home: Path, shardwise: Run, tmp_path: Path
) -> None:
    place = tmp_path / "pytorch_model_fsdp_0"
    place.mkdir()
    canary = tmp_path / "canary"
    (place / ".metadata").write_bytes(pickle.dumps(Trap(canary)))
    done = train(shardwise, home, "hostile", tmp_path, "1xCPU", expect=2)
    assert f"cannot read {place}/.metadata" in done.stderr
    assert "it names 'posix.system'; nothing in it was run" in done.stderr
    assert "Traceback" not in done.stderr
    assert not canary.exists()
