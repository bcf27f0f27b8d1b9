from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.migrate.migration import migrate_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(text: str, *words: str) -> tuple[dict[str, Any], str]:
    Path("run.yaml").write_text(text)
    command = ["migrate", "run.yaml", "--to", "accelerate", *words]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    return yaml.safe_load(Path("accelerate.yaml").read_text()), result.output


def test_hsdp_goes_there_and_comes_back() -> None:
    tree, shown = exported(
        "model: llama-3.1-8b\ncluster: 2x8xH100\noptim: {lr: 1e-5}\n"
        "mesh: {replicate: 2, shard: 8}\n"
        "shard: {strategy: hybrid_shard, unit_classes: [LlamaDecoderLayer]}\n"
        "precision: {param: bf16, reduce: fp32}\n"
        "memory: {checkpoint_activations: selective, compile: false}\n"
    )
    assert tree["distributed_type"] == "FSDP" and tree["num_processes"] == 16
    assert tree["fsdp_config"]["fsdp_version"] == 2
    assert tree["fsdp_config"]["fsdp_activation_checkpointing"] is True
    for part in ("TrainingArguments' learning_rate", "reduces in the format of mixed_precision"):
        assert part in shown
    settings = migrate_file(Path("accelerate.yaml"), None, []).settings
    assert settings["shard.strategy"] == "hybrid_shard"
    assert (settings["mesh.replicate"], settings["mesh.shard"]) == (2, 8)
    assert settings["shard.unit_classes"] == ["LlamaDecoderLayer"]


def test_axes_inside_a_replica_are_sizes_there() -> None:
    tree, shown = exported(
        "model: tiny-llama\ncluster: 8xCPU\nmesh: {tensor: 2, shard: 4, context: 1}\n"
        "shard: {strategy: full_shard}\ndata: {source: synthetic, seq_len: 32}\n"
    )
    assert tree["num_processes"] == 8
    assert tree["parallelism_config"] == {
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 2,
    }
    assert "mesh.context: 1" in shown
    settings = migrate_file(Path("accelerate.yaml"), None, []).settings
    assert (settings["mesh.shard"], settings["mesh.tensor"]) == (4, 2)


def test_every_key_has_a_line_and_the_plan_fills_the_rest() -> None:
    text = "model: tiny-llama\ncluster: 2xCPU\nshard: {strategy: no_shard}\ngates: {min_mfu: 0.3}\n"
    tree, shown = exported(text, "memory.compile=false")
    assert tree["distributed_type"] == "MULTI_CPU" and tree["use_cpu"] is True
    assert "fsdp_config" not in tree
    for key in ("model: tiny-llama", "cluster: 2xCPU", "shard.strategy: no_shard", "gates.min_mfu"):
        assert key in shown
    assert "Planned" in shown and "mixed_precision=no" in shown


def test_another_target_is_an_error() -> None:
    with pytest.raises(UserError, match="--to x is not known"):
        CliRunner().invoke(app, ["migrate", "run.yaml", "--to", "x"], catch_exceptions=False)
