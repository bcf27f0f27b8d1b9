"""`shardwise doctor` as users meet it: what it prints, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.doctor.registry import CHECKS
from shardwise.errors import ExitCode, UserError

Run = Callable[..., subprocess.CompletedProcess[str]]
TINY = "model: tiny-llama\ndata: {source: synthetic, seq_len: 16}\ncluster: 1xCPU\n"
LLAMA = "model: llama-3.1-8b\ndata: synthetic\ncluster: 4x8xH100\n"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "llama.yaml").write_text(LLAMA)


def doctor(*words: str) -> tuple[str, int]:
    """(what was printed, the exit code)."""
    result = CliRunner().invoke(app, ["doctor", *words])
    error = result.exception
    assert error is None or isinstance(error, UserError), result.output
    return result.stdout, int(error.code) if isinstance(error, UserError) else result.exit_code


def test_the_command_ends_with_the_code_of_its_error(tmp_path: Path, shardwise: Run) -> None:
    config = str(tmp_path / "llama.yaml")
    done = shardwise("doctor", config, "shard.unit_min_params=1000000000", expect=2)
    assert "error SW101: Only the root is a unit" in done.stdout
    assert "is more than the 218.1M parameters" in done.stdout
    assert "has faults: SW101" in done.stderr
    assert "shardwise doctor --explain SW101" in done.stderr


def test_a_healthy_configuration_is_said_to_be_so() -> None:
    told, code = doctor("llama.yaml")
    assert code == 0
    assert "nvidia-smi shows none" in told
    assert f"llama.yaml: nothing found by {CHECKS_OF_A_PLAN} checks" in told


CHECKS_OF_A_PLAN = sum(name.startswith("SW1") and name < "SW150" for name in CHECKS) - 1


def test_warnings_end_a_strict_command() -> None:
    words = ("llama.yaml", "precision.reduce=bf16")
    told, code = doctor(*words)
    assert code == 0 and "warning SW120" in told
    assert doctor(*words, "--strict")[1] == ExitCode.CONFIG


def test_what_cannot_be_planned_keeps_its_own_code() -> None:
    told, code = doctor("llama.yaml", "cluster=1xT4", "--json")
    assert code == ExitCode.DOES_NOT_FIT
    (finding,) = json.loads(told)["findings"]
    assert finding["id"] == "SW100" and "does not fit on 1xT4" in finding["evidence"]
    assert doctor("llama.yaml", "optim.lr=fast")[1] == ExitCode.CONFIG


def test_a_fault_of_the_machine_is_one_of_the_environment(tmp_path: Path) -> None:
    told, code = doctor("tiny.yaml", f"runs_dir={tmp_path / 'tiny.yaml'}", "--json")
    assert code == ExitCode.ENVIRONMENT
    found = json.loads(told)
    assert [finding["id"] for finding in found["findings"]] == ["SW206"]
    assert found["node"]["gpus"] == []


def test_a_check_is_explained() -> None:
    told, code = doctor("--explain", "sw104")
    assert code == 0 and told.startswith("SW104 (warning): Units are gathered across nodes")
    assert "fix: write shard.strategy=hybrid_shard" in told
    assert "exit code: 4" in doctor("--explain", "SW206")[0]
    result = CliRunner().invoke(app, ["doctor", "--explain", "SW10"])
    assert isinstance(result.exception, UserError) and "did you mean SW" in str(result.exception)


def test_all_checks_are_listed() -> None:
    told, _ = doctor("--list")
    assert all(f"  {name}  " in told for name in CHECKS)
    rows = json.loads(doctor("--list", "--json")[0])
    assert [row["id"] for row in rows] == list(CHECKS)
    assert all(row["why"].endswith(".") and row["fix"] for row in rows)
