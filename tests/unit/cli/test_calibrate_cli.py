"""`shardwise plan --calibrate` through the real command, on ranks of this CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import rank_environment, run_forked

RUN = "model: tiny-llama\ndata: synthetic\n"


def shardwise(folder: Path, *words: str, expect: int = 0) -> tuple[str, str]:
    """What the command prints, and what it says beside it."""
    environ = rank_environment() | {"SHARDWISE_CACHE": str(folder / "cache")}
    done = run_forked(folder, *words, environ=environ, cwd=folder, expect=expect)
    return done.stdout, done.stderr


@pytest.mark.dist
def test_a_calibrated_machine_gets_a_forecast(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    words = ("plan", "run.yaml", "--cluster", "2xCPU")
    before, _ = shardwise(tmp_path, *words)
    assert "`shardwise plan --calibrate` measures them" in before
    found, said = shardwise(tmp_path, *words, "--calibrate", "--quick", "--json")
    plan = json.loads(found)
    assert plan["forecast"]["source"] == "measured"
    assert plan["forecast"]["tokens_per_s"] > 0
    assert plan["cluster"]["measured_inside"]["bytes_per_s"] > 0
    for what in ("measuring collectives of 2 ranks", "matmul fp32", "link inside a domain"):
        assert what in said
    [path] = (tmp_path / "cache" / "calibration").iterdir()
    assert f"kept in {path}" in said
    later, _ = shardwise(tmp_path, *words)
    assert "from measured rates" in later
    path.write_text(path.read_text()[:100])
    _, said = shardwise(tmp_path, *words, expect=2)
    assert "to measure again: shardwise plan --calibrate" in said


def test_a_gpu_that_is_not_here_cannot_be_measured(tmp_path: Path) -> None:
    _, said = shardwise(tmp_path, "plan", "--calibrate", "--cluster", "8xH100", expect=4)
    assert "cannot measure H100 here" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan",), "no configuration is named"),
        (("plan", "run.yaml", "--quick"), "--quick does nothing by itself"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    _, said = shardwise(tmp_path, *words, expect=2)
    assert says in said
