"""Adapters over frozen weights in float8, through the real command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from frozen_runs import Run, make_home, train
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.generate.adapted import load_adapted
from shardwise.kernels.float8_rows import pack

Losses = Callable[[Path], dict[int, float]]
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = "{method: lora, base: float8, rank: 4, alpha: 8}"
    return make_home(tmp_path_factory.mktemp("float8"), adapter, 64)


@pytest.fixture(scope="module")
def finished(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "finished")
    return home / "finished"


def test_the_plan_says_what_is_stored_and_how_it_multiplies(home: Path, finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())
    assert "frozen weights are in float8" in plan["choices"]["adapter"]["why"]
    assert plan["choices"]["linear"]["value"] == "param"
    assert "does not compute float8" in plan["choices"]["linear"]["why"]
    files = load_file(home / "base" / "model.safetensors")
    layers = [weight for name, weight in files.items() if name.endswith("_proj.weight")]
    packed = plan["model"]["adapter"]
    assert packed["packed_bytes"] == sum((w.shape[1] + 16) * len(w) for w in layers)
    manifest = json.loads((find_checkpoint(finished) / "manifest.json").read_text())
    assert manifest["base"].endswith(", in float8")
    said = CliRunner().invoke(app, ["plan", str(home / "run.yaml"), "cluster=2xH200", "--json"])
    there = json.loads(said.stdout)["choices"]["linear"]
    assert there["value"] == "float8_base"
    assert "backward transposes a layer's bytes" in there["why"]


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(
    home: Path, finished: Path, shardwise: Run, losses_of: Losses
) -> None:
    train(shardwise, home, "stopped", "train.stop_after=2")
    train(shardwise, home, "stopped")
    assert losses_of(home / "stopped") == losses_of(finished)


def test_a_checkpoint_answers_and_merges(home: Path, finished: Path, shardwise: Run) -> None:
    checkpoint = verify_checkpoint(find_checkpoint(finished))
    model = load_adapted(
        checkpoint, torch.float32, torch.device("cpu"), base=home / "base", code_dir=None
    )
    for name, weight in load_file(home / "base" / "model.safetensors").items():
        expected = pack(weight) if name.endswith("_proj.weight") else weight.float()
        assert torch.equal(model.get_parameter(name), expected), name
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()
    said = shardwise("export", str(finished), "--to", str(home / "merged"), "--merge")
    words = " ".join(said.stdout.split())
    assert "in float8, and are merged into the weights as their files have them" in words
    before, after = (load_file(home / place / "model.safetensors") for place in ("base", "merged"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["precision.linear=float8"], "write adapter.base=float8"),
        (["precision.param=fp16"], "whose range is too small"),
        (["model=tiny-llama", "model.overrides={intermediate_size: 72}"], "multiples of 16"),
    ],
)
def test_faults_are_told_before_a_rank_starts(home: Path, words: list[str], shown: str) -> None:
    done = CliRunner().invoke(app, ["train", str(home / "run.yaml"), f"runs_dir={home}", *words])
    assert isinstance(done.exception, UserError)
    assert shown in " ".join(str(done.exception).split())
    assert not (home / "run").exists()
