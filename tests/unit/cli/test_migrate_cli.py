from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError

FILE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_use_orig_params: false
  fsdp_bogus: 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text(FILE)
    return tmp_path


def output_of(*words: str) -> str:
    result = CliRunner().invoke(app, ["migrate", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_it_writes_shows_every_key_and_plans() -> None:
    shown = output_of("fsdp.yaml", "model=llama-3.1-8b", "cluster=2x8xH100")
    for part in ("Mapped", "Changed", "Dropped", "fsdp_bogus: 1", "unknown", "wrote run.yaml"):
        assert part in shown
    assert "hybrid_shard, mesh replicate=2 x shard=8" in " ".join(shown.split())
    assert "next: shardwise train run.yaml" in shown


def test_without_a_model_or_a_cluster_it_says_the_command_to_type() -> None:
    shown = output_of("fsdp.yaml", "--out", "new.yaml")
    assert "no model and cluster" in shown
    assert "next: shardwise plan new.yaml model=NAME cluster=8xH100" in shown


def test_nothing_is_overwritten() -> None:
    Path("run.yaml").write_text("mine")
    with pytest.raises(UserError, match="exists already") as caught:
        output_of("fsdp.yaml")
    assert "run-2.yaml" in caught.value.fix
    assert Path("run.yaml").read_text() == "mine"
