"""Adapters through the real command: trained, saved alone, resumed, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from frozen_runs import Run, make_home, train
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.read import find_checkpoint, read_tensor
from shardwise.cli.main import app
from shardwise.errors import UserError

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = "{method: lora, rank: 4, alpha: 8, dropout: 0.1}"
    return make_home(tmp_path_factory.mktemp("adapters"), adapter, 32)


@pytest.fixture(scope="module")
def finished(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "finished")
    return home / "finished"


@pytest.fixture(scope="module")
def stopped(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "stopped", "train.stop_after=2")
    return home / "stopped"


def adapters_of(run_dir: Path) -> dict[str, torch.Tensor]:
    path = find_checkpoint(run_dir)
    index = read_index(path)
    return {name: read_tensor(path, stored, stored.dtype) for name, stored in index.items()}


def test_a_checkpoint_holds_adapters_alone(finished: Path, shardwise: Run) -> None:
    names = [name for name in adapters_of(finished) if name.startswith("model.")]
    assert len(names) == 2 * 2 * 7
    assert all(name.endswith(("lora_A", "lora_B")) for name in names)
    manifest = json.loads((find_checkpoint(finished) / "manifest.json").read_text())
    assert manifest["base"].startswith("sha256 ")
    shardwise("checkpoint", "verify", str(finished))
    shown = shardwise("plan", str(finished / "config.yaml")).stdout
    assert "frozen in fp32" in shown
    plan = json.loads((finished / "plan.json").read_text())
    choice = plan["choices"]["adapter"]
    assert (choice["value"], choice["source"]) == ("lora", "user")
    assert "of rank 4 in 14 layers" in choice["why"]
    assert "no adapters in 1 x lm_head" in choice["why"]


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(
    home: Path,
    finished: Path,
    stopped: Path,
    shardwise: Run,
    losses_of: Callable[[Path], dict[int, float]],
) -> None:
    resumed = Path(shutil.copytree(stopped, home / "resumed"))
    train(shardwise, home, "resumed")
    assert losses_of(resumed) == losses_of(finished)
    found, expected = adapters_of(resumed), adapters_of(finished)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_other_weights_are_refused(home: Path, stopped: Path, shardwise: Run) -> None:
    other = Path(shutil.copytree(home / "base", home / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    said = train(shardwise, home, "stopped", f"model.name={other}", expect=5)
    assert "holds adapters that were trained over other weights" in said.stderr
    assert "model.weights_from=DIR" in said.stderr


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("adapter.rank=8", "adapter.rank: 4 -> 8"),
        ("adapter.alpha=16", "adapter.alpha: 8.0 -> 16.0"),
        ("adapter={method: none, rank: 16, alpha: 32, dropout: 0}", "checkpoints of adapters"),
    ],
)
def test_other_adapters_are_refused(
    home: Path, stopped: Path, shardwise: Run, change: str, shown: str
) -> None:
    assert shown in train(shardwise, home, stopped.name, change, expect=2).stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["adapter.targets=[qkv_proj]"], "the model's linear layers are q_proj, k_proj, v_proj"),
        (["adapter.targets=lm_head"], "matches the output head, which gets no adapters yet"),
        (["precision.linear=float8"], "write adapter.base=float8"),
        (["adapter.dropout=1"], "it must be at least 0 and below 1"),
        (["adapter={method: none, alpha: 32, dropout: 0}"], "adapter.method is none, so it would"),
        (["model=gpt2"], "the model has no linear layers"),
        (["model=mixtral-8x7b", "adapter.targets=[down_proj]"], "write adapter.rank=8"),
    ],
)
def test_faults_are_told_before_a_rank_starts(home: Path, words: list[str], shown: str) -> None:
    """In this process, which spares the seconds that torch takes to import."""
    done = CliRunner().invoke(app, ["train", str(home / "run.yaml"), f"runs_dir={home}", *words])
    assert isinstance(done.exception, UserError)
    assert shown in " ".join(str(done.exception).split())
    assert not (home / "run").exists()
