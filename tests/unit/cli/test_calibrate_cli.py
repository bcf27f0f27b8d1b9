"""`shardwise plan --calibrate` through the real command, on ranks of this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import rank_environment, run_forked

SHARDWISE = Path(sys.executable).with_name("shardwise")
RUN = "model: tiny-llama\ndata: synthetic\n"


def shardwise(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    cache = {"SHARDWISE_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(SHARDWISE), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **cache},
        timeout=240,
    )


@pytest.mark.dist
def test_a_calibrated_machine_gets_a_forecast(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    before = shardwise(tmp_path, "plan", "run.yaml", "--cluster", "2xCPU")
    assert "`shardwise plan --calibrate` measures them" in before.stdout
    words = ("plan", "--calibrate", "--quick", "run.yaml", "--cluster", "2xCPU", "--json")
    environ = rank_environment() | {"SHARDWISE_CACHE": str(tmp_path / "cache")}
    done = run_forked(tmp_path, *words, environ=environ, cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert plan["forecast"]["source"] == "measured"
    assert plan["forecast"]["tokens_per_s"] > 0
    assert plan["cluster"]["measured_inside"]["bytes_per_s"] > 0
    for what in ("measuring collectives of 2 ranks", "matmul fp32", "link inside a domain"):
        assert what in done.stderr
    [path] = (tmp_path / "cache" / "calibration").iterdir()
    assert f"kept in {path}" in done.stderr
    later = shardwise(tmp_path, "plan", "run.yaml", "--cluster", "2xCPU")
    assert "from measured rates" in later.stdout
    path.write_text(path.read_text()[:100])
    damaged = shardwise(tmp_path, "plan", "run.yaml", "--cluster", "2xCPU")
    assert damaged.returncode == 2
    assert "to measure again: shardwise plan --calibrate" in damaged.stderr


def test_a_gpu_that_is_not_here_cannot_be_measured(tmp_path: Path) -> None:
    done = shardwise(tmp_path, "plan", "--calibrate", "--cluster", "8xH100")
    assert done.returncode == 4
    assert "cannot measure H100 here" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan",), "no configuration is named"),
        (("plan", "run.yaml", "--quick"), "--quick does nothing by itself"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    done = shardwise(tmp_path, *words)
    assert done.returncode == 2
    assert says in done.stderr
