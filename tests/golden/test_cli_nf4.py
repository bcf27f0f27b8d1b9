"""QLoRA through the real command: trained, resumed, sharded anew, exported, merged and refused."""

from __future__ import annotations

import json
import shutil
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
from shardwise.kernels.nf4 import pack

Losses = Callable[[Path], dict[int, float]]
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter = "{method: lora, base: nf4, rank: 4, alpha: 8}"
    return make_home(tmp_path_factory.mktemp("nf4"), adapter, 64)


@pytest.fixture(scope="module")
def finished(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "finished")
    return home / "finished"


@pytest.fixture(scope="module")
def stopped(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "stopped", "train.stop_after=2")
    return home / "stopped"


def test_the_plan_says_what_is_stored(home: Path, finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())
    assert "frozen weights are in NF4" in plan["choices"]["adapter"]["why"]
    # Rows of 64 weights are 32 + 1 + 4 bytes, padded to 48; rows of 128 are 64 + 2 + 4, to 80.
    files = load_file(home / "base" / "model.safetensors")
    layers = [weight for name, weight in files.items() if name.endswith("_proj.weight")]
    packed = plan["model"]["adapter"]
    assert packed["packed_params"] == sum(weight.numel() for weight in layers)
    assert packed["packed_bytes"] == sum({64: 48, 128: 80}[w.shape[1]] * len(w) for w in layers)
    assert packed["largest_packed"] == 64 * 128
    manifest = json.loads((find_checkpoint(finished) / "manifest.json").read_text())
    assert manifest["base"].startswith("sha256 ")
    assert manifest["base"].endswith(", in NF4")


def test_a_resumed_run_is_the_uninterrupted_one(
    home: Path, finished: Path, stopped: Path, shardwise: Run, losses_of: Losses
) -> None:
    """Bit for bit on as many ranks, and to rounding on another number of them."""
    resumed = Path(shutil.copytree(stopped, home / "resumed"))
    train(shardwise, home, "resumed")
    assert losses_of(resumed) == losses_of(finished)
    alone = Path(shutil.copytree(stopped, home / "alone"))
    train(shardwise, home, "alone", "cluster=1xCPU", "shard.strategy=no_shard")
    assert losses_of(alone) == pytest.approx(losses_of(finished), rel=1e-5)


def test_losses_are_near_those_over_floats(
    home: Path, finished: Path, shardwise: Run, losses_of: Losses
) -> None:
    train(shardwise, home, "floats", "adapter.base=param")
    expected = losses_of(home / "floats")
    assert losses_of(finished) == pytest.approx(expected, rel=0.02)
    assert losses_of(finished) != expected


def test_adapters_are_merged_into_the_weights_of_the_files(
    home: Path, finished: Path, shardwise: Run
) -> None:
    shardwise("export", str(finished), "--to", str(home / "peft"))
    said = shardwise("export", str(finished), "--to", str(home / "merged"), "--merge")
    assert "are merged into the weights as their files have them" in " ".join(said.stdout.split())
    adapters = load_file(home / "peft" / "adapter_model.safetensors")
    before, after = (load_file(home / place / "model.safetensors") for place in ("base", "merged"))
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = before[f"{name}.weight"].float() + 2 * (b @ a)
    assert after[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(after[f"{name}.weight"], expected.bfloat16())


def test_prompts_are_answered_over_the_same_bytes(home: Path, finished: Path) -> None:
    checkpoint = verify_checkpoint(find_checkpoint(finished))
    model = load_adapted(
        checkpoint, torch.float32, torch.device("cpu"), base=home / "base", code_dir=None
    )
    for name, weight in load_file(home / "base" / "model.safetensors").items():
        expected = pack(weight) if name.endswith("_proj.weight") else weight.float()
        assert torch.equal(model.get_parameter(name), expected), name
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()


def test_another_base_is_refused(home: Path, stopped: Path, shardwise: Run) -> None:
    said = train(shardwise, home, stopped.name, "adapter.base=param", expect=2)
    assert "adapter.base: nf4 -> param" in said.stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["precision.linear=float8"], "it casts weights that are trained"),
        (["adapter={method: none, base: nf4}"], "adapter.method is none, so it would be ignored"),
        (["model=tiny-llama", "model.overrides={intermediate_size: 96}"], "multiples of 64"),
    ],
)
def test_faults_are_told_before_a_rank_starts(home: Path, words: list[str], shown: str) -> None:
    done = CliRunner().invoke(app, ["train", str(home / "run.yaml"), f"runs_dir={home}", *words])
    assert isinstance(done.exception, UserError)
    assert shown in " ".join(str(done.exception).split())
    assert not (home / "run").exists()
