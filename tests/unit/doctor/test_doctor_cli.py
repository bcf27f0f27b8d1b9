"""`shardwise doctor` as users meet it: what it prints, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from healthy import gpus, server
from known_lines import HEALTHY, KNOWN_LINES
from typer.testing import CliRunner

import slow_runs
from shardwise.cli.main import app
from shardwise.doctor.registry import CHECKS
from shardwise.doctor.run.case import Case
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
    # Warnings depend on the machine that this runs on.
    assert [f["id"] for f in found["findings"] if f["level"] == "error"] == ["SW206"]
    assert found["node"]["gpus"] == []


def write_run(folder: Path, case: Case) -> Path:
    assert case.run.plan is not None
    (folder / "logs/attempt-1").mkdir(parents=True)
    case.run.plan.save(folder / "plan.json")
    lines = "".join(json.dumps(event) + "\n" for event in case.run.events)
    (folder / "events.jsonl").write_text(lines)
    return folder


def test_a_run_is_looked_at(tmp_path: Path) -> None:
    plan = slow_runs.plan_of("model=llama-3.1-8b", "cluster=8xH100")
    run = write_run(tmp_path / "run", slow_runs.healthy_run(plan, 1))
    (run / "logs/attempt-1/rank-0.log").write_text(HEALTHY)
    told, code = doctor(str(run))
    assert code == 0 and "nothing found by" in told
    (run / "logs/attempt-1/rank-5.log").write_text(f"{KNOWN_LINES['SW534']}\n")
    told, code = doctor(str(run))
    assert code == ExitCode.VERIFY_FAILED
    assert "error SW534: The GPU's memory has an uncorrectable error" in told
    assert "seen: attempt-1/rank-5.log, line 1: torch.AcceleratorError" in told


def test_a_slow_run_gets_its_cause_first(tmp_path: Path) -> None:
    plan = slow_runs.plan_of("model=llama-3.1-8b", "cluster=8xH100")
    case = slow_runs.CAUSES["SW401"][1](plan, 0, 0.5).run()
    run = write_run(tmp_path / "run", case)
    told, code = doctor(str(run))
    assert code == 0 and told.startswith("warning SW401: Steps wait for data\n")
    assert doctor(str(run), "--strict")[1] == ExitCode.VERIFY_FAILED
    causes = json.loads(doctor(str(run), "--json")[0])["causes"]
    assert causes[0]["id"] == "SW401" and 0.25 < causes[0]["share"] < 0.4


def test_any_log_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text(f"{KNOWN_LINES['SW608']}\n{KNOWN_LINES['SW602']}\n")
    told, code = doctor("--log", str(log))
    assert code == ExitCode.VERIFY_FAILED
    assert told.index("SW602") < told.index("SW608")  # what follows from it comes after the cause
    told, code = doctor("llama.yaml", "--log", str(log))
    assert "SW602" in told and code == ExitCode.VERIFY_FAILED
    result = CliRunner().invoke(app, ["doctor", "--log", "none.log"])
    assert isinstance(result.exception, UserError) and "cannot be read" in str(result.exception)


def test_nodes_are_compared(tmp_path: Path) -> None:
    for name, driver in (("a", "570.1"), ("b", "570.1"), ("c", "535.9")):
        node = server(None, host=f"gpu-{name}", gpus=gpus(8, driver_version=driver)).to_dict()
        for gpu in node["gpus"]:
            gpu["driver_version"] = driver
        (tmp_path / f"{name}.json").write_text(json.dumps({"node": node}))
    assert doctor("a.json", "b.json")[1] == 0
    told, code = doctor("a.json", "b.json", "c.json")
    assert code == ExitCode.ENVIRONMENT
    assert "driver 570.1 on gpu-a, gpu-b; driver 535.9 on gpu-c" in told
    (tmp_path / "c.json").write_text("{}")
    result = CliRunner().invoke(app, ["doctor", "a.json", "c.json"])
    assert isinstance(result.exception, UserError)
    assert "is not what a node's doctor has said" in str(result.exception)


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
