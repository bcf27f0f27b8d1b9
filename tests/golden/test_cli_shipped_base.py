"""Adapters over weights that keep the bytes of their files, through the real command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_runs import CONFIG, Run, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from quantised_models import read_all, save_both
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.generate.adapted import load_adapted
from shardwise.kernels import mxfp4

Losses = Callable[[Path], dict[int, float]]
pytestmark = pytest.mark.dist

ADAPTER = "{method: lora, rank: 8, targets: [all-linear, experts.*]}"
IDS = torch.arange(24)[None] * 7 % 131


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shipped")
    for family in ("gpt_oss", "deepseek_v3"):
        save_both(family, home / family, home / f"{family}-plain")
    text = CONFIG.replace("MODEL", str(home / "gpt_oss")).replace("ADAPTER", ADAPTER)
    (home / "run.yaml").write_text(text)
    return home


@pytest.fixture(scope="module")
def finished(home: Path, shardwise: Run) -> Path:
    train(shardwise, home, "finished")
    return home / "finished"


@pytest.fixture(scope="module")
def answers(home: Path, finished: Path) -> Any:
    """What `shardwise generate` computes with."""
    checkpoint = verify_checkpoint(find_checkpoint(finished))
    return load_adapted(checkpoint, torch.float32, torch.device("cpu"), base=None, code_dir=None)


def plan_of(home: Path, *words: str) -> Any:
    done = CliRunner().invoke(app, ["plan", str(home / "run.yaml"), *words, "--json"])
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)


def test_the_plan_keeps_the_format_and_says_why(home: Path, finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())
    assert plan["choices"]["base"]["value"] == "mxfp4"
    assert "the bytes of its files stay as they are" in plan["choices"]["base"]["why"]
    assert "frozen weights are in MXFP4" in plan["choices"]["adapter"]["why"]
    files = read_all(home / "gpt_oss")
    blocks = [tensor for name, tensor in files.items() if name.endswith("_blocks")]
    counted = plan["model"]["adapter"]
    assert counted["packed_params"] == sum(2 * tensor.numel() for tensor in blocks)
    # Rows of 64 weights are 32 + 2 bytes, padded to 48; rows of 96 are 48 + 3, to 64.
    row_bytes = {2: 48, 3: 64}
    rows = [(tensor[..., 0, 0].numel(), tensor.shape[2]) for tensor in blocks]
    assert counted["packed_bytes"] == sum(count * row_bytes[groups] for count, groups in rows)
    assert not any("the files are in" in warning for warning in plan["warnings"])
    manifest = json.loads((find_checkpoint(finished) / "manifest.json").read_text())
    assert manifest["base"].endswith(", in MXFP4")


@pytest.mark.parametrize(
    ("words", "base", "why"),
    [
        (["model={root}/deepseek_v3"], "fp8", "published in fp8 blocks"),
        (["model={root}/gpt_oss-plain"], "param", "not published packed"),
        (["adapter.base=nf4", "model={root}/deepseek_v3-plain"], None, "multiples of 64"),
        (["adapter.base=param"], "param", "given"),
        (["mesh.tensor=2"], "param", "mesh.tensor divides weights"),
        (["model.weights_from={root}/gpt_oss-plain"], "param", "not published packed"),
    ],
)
def test_the_format_of_frozen_weights(
    home: Path, words: list[str], base: str | None, why: str
) -> None:
    given = [word.replace("{root}", str(home)) for word in words]
    if base is None:
        done = CliRunner().invoke(app, ["plan", str(home / "run.yaml"), *given])
        assert why in " ".join(str(done.exception).split())
        return
    choice = plan_of(home, *given)["choices"]["base"]
    assert choice["value"] == base
    assert why in choice["why"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["adapter.base=fp8"], "those of {root}/gpt_oss have MXFP4"),
        (["adapter.base=mxfp4", "model={root}/gpt_oss-plain"], "have plain weights"),
        (["adapter.base=mxfp4", "mesh.tensor=2"], "packed weights are not divided"),
        (["adapter={method: none, base: mxfp4}"], "adapter.method is none"),
    ],
)
def test_formats_that_files_do_not_have_are_refused(
    home: Path, words: list[str], shown: str
) -> None:
    given = [word.replace("{root}", str(home)) for word in words]
    done = CliRunner().invoke(app, ["train", str(home / "run.yaml"), f"runs_dir={home}", *given])
    assert isinstance(done.exception, UserError)
    assert shown.replace("{root}", str(home)) in " ".join(str(done.exception).split())
    assert not (home / "run").exists()


def test_a_resumed_run_is_the_uninterrupted_one(
    home: Path, finished: Path, shardwise: Run, losses_of: Losses
) -> None:
    train(shardwise, home, "stopped", "train.stop_after=2")
    alone = Path(shutil.copytree(home / "stopped", home / "alone"))
    train(shardwise, home, "stopped")
    assert losses_of(home / "stopped") == losses_of(finished)
    said = train(shardwise, home, "alone", "adapter.base=param", expect=2)
    assert "adapter.base: mxfp4 -> param" in said.stderr
    train(shardwise, home, "alone", "cluster=1xCPU", "shard.strategy=no_shard")
    assert losses_of(alone) == pytest.approx(losses_of(finished), rel=1e-5)


def test_answers_are_of_the_same_bytes(home: Path, answers: Any) -> None:
    files = read_all(home / "gpt_oss")
    for name in (n.removesuffix("_blocks") for n in files if n.endswith("_blocks")):
        rows = mxfp4.join(files[f"{name}_blocks"], files[f"{name}_scales"])
        assert torch.equal(answers.get_parameter(name), rows.view(torch.int32)), name


def test_merged_weights_are_plain(home: Path, finished: Path, shardwise: Run, answers: Any) -> None:
    """In bf16, or as asked for: then they compute what training computed."""
    said = shardwise("export", str(finished), "--to", str(home / "merged"), "--merge")
    assert "4 packed tensors became plain ones in bfloat16" in " ".join(said.stdout.split())
    merged, plain = read_all(home / "merged"), read_all(home / "gpt_oss-plain")
    assert merged.keys() == plain.keys()
    index = json.loads((home / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == plain.keys()
    name = "model.layers.1.mlp.experts.down_proj"
    assert merged[name].dtype == torch.bfloat16 and merged[name].shape == plain[name].shape
    assert not torch.equal(merged[name], plain[name].bfloat16())
    words = ("--to", str(home / "wide"), "--merge", "--dtype", "fp32")
    shardwise("export", str(finished), *words)
    assert "quantization_config" not in json.loads((home / "wide" / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(home / "wide", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [each.eval()(input_ids=IDS).logits for each in (model, answers)]
    assert torch.allclose(*logits, atol=1e-5)


def test_a_file_that_is_not_what_its_config_says(home: Path, shardwise: Run) -> None:
    """One linear layer is plain, where config.json says that all are packed."""
    shutil.copytree(home / "deepseek_v3", home / "mixed")
    name = "model.layers.1.self_attn.o_proj.weight"
    index = home / "mixed" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for key in (name, f"{name}_scale_inv"):
        file = home / "mixed" / content["weight_map"][key]
        tensors = load_file(file)
        if key == name:
            tensors[name] = tensors[name].float()
        else:
            del tensors[key], content["weight_map"][key]
        save_file(tensors, file)
    index.write_text(json.dumps(content))
    words = (f"model={home / 'mixed'}", "cluster=1xCPU", "train.stop_after=1")
    said = " ".join(train(shardwise, home, "mixed-run", *words, expect=2).stderr.split())
    assert "is not in fp8 blocks in the files" in said
    assert "adapter.base=param" in said
    train(shardwise, home, "mixed-floats", *words, "adapter.base=param")
