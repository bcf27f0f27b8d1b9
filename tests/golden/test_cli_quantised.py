"""The real command on gpt-oss and DeepSeek-V3 as they are published: in MXFP4 and in fp8 blocks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quantised_models import read_all, save_both
from shardwise.cli.main import app

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
data: {source: synthetic, seq_len: 16}
shard: {strategy: full_shard}
precision: {param: fp32}
train: {steps: 3, global_batch: 4}
observe: {log_every: 1}
"""
METHODS = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("quantised")
    (home / "run.yaml").write_text(CONFIG)
    for family in METHODS:
        save_both(family, home / f"{family}-quantised", home / f"{family}-plain")
    return home


def words(home: Path, name: str, model: str, *more: str) -> tuple[str, ...]:
    common = (f"runs_dir={home}", f"name={name}", f"model.name={home / model}")
    return ("train", str(home / "run.yaml"), *common, *more)


def losses(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_a_published_model_trains_and_is_exported_plainly(
    family: str, home: Path, shardwise: Run
) -> None:
    said = ""
    for kind in ("plain", "quantised"):
        model = f"{family}-{kind}"
        done = shardwise(*words(home, f"run-{model}", model, "cluster.name=2xCPU"))
        said = done.stdout
    assert f"dequantised from {METHODS[family]}" in said
    plain, quantised = (losses(home / f"run-{family}-{kind}") for kind in ("plain", "quantised"))
    assert len(quantised) == 3
    assert quantised == plain
    exported = {}
    for kind in ("plain", "quantised"):
        out = home / f"out-{family}-{kind}"
        done = shardwise("export", str(home / f"run-{family}-{kind}"), "--to", str(out))
        exported[kind] = read_all(out)
        note = f"plain weights: the {METHODS[family]} of the model's own config.json is left out"
        assert (note in done.stdout) == (kind == "quantised")
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert exported["quantised"].keys() == read_all(home / f"{family}-plain").keys()
    for name, tensor in exported["plain"].items():
        assert tensor.dtype == torch.float32
        assert torch.equal(exported["quantised"][name], tensor), name


def test_what_is_not_dequantised_is_refused_before_a_rank_starts(
    home: Path, shardwise: Run
) -> None:
    shutil.copytree(home / "gpt_oss-plain", home / "gptq")
    file = home / "gptq" / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "quantization_config": {"quant_method": "gptq"}}))
    done = shardwise(*words(home, "gptq-run", "gptq", "cluster.name=2xCPU"), expect=2)
    said = " ".join(done.stderr.split())
    assert "are quantised with gptq" in said
    assert "only mxfp4 and fp8 are dequantised here" in said
    assert "model.weights_from=DIR" in said
    assert "Traceback" not in said
    assert not (home / "gptq-run" / "logs").exists()
    # The same model takes plain weights from elsewhere.
    weights = f"model.weights_from={home / 'gpt_oss-plain'}"
    run = words(home, "gptq-plain", "gptq", weights, "cluster.name=2xCPU", "train.stop_after=1")
    shardwise(*run)


@pytest.mark.parametrize(
    ("family", "base", "shown"),
    [
        ("gpt_oss", "param", "adapter.base=float8 keeps one byte of each, and holds each of their"),
        ("deepseek_v3", "param", "the files are in fp8"),
        ("gpt_oss", "float8", None),
    ],
)
def test_a_plan_says_that_frozen_weights_grow(
    home: Path, family: str, base: str, shown: str | None
) -> None:
    adapter = f"adapter={{method: lora, base: {base}}}"
    given = words(home, "grown", f"{family}-quantised", adapter, "cluster.name=1xCPU")[1:]
    done = CliRunner().invoke(app, ["plan", *given, "--json"])
    assert done.exit_code == 0, done.output
    warnings = " ".join(json.loads(done.stdout)["warnings"])
    assert shown in warnings if shown else "the files are in" not in warnings


def test_missing_scales_are_an_error_that_names_them(home: Path, shardwise: Run) -> None:
    shutil.copytree(home / "gpt_oss-quantised", home / "damaged")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    index = home / "damaged" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = home / "damaged" / content["weight_map"].pop(name)
    index.write_text(json.dumps(content))
    save_file({k: v for k, v in load_file(file).items() if k != name}, file)
    done = shardwise(*words(home, "damaged-run", "damaged", "cluster.name=1xCPU"), expect=2)
    said = "".join(done.stderr.split())
    assert f"cannotbedequantised:thefileshaveno{name}" in said
    assert "Traceback" not in said
