from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
from forkserver import forkserver

GOLDEN = Path(__file__).with_name("losses.json")
SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

Run = Callable[..., subprocess.CompletedProcess[str]]
TIMEOUT_S = 240


def rank_environment() -> dict[str, str]:
    """One thread a rank, so that sums are the same on every machine's number of cores."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return rank_environment()


@pytest.fixture(scope="session")
def installed() -> Run:
    """Runs the installed command, or another; `expect` is the exit code that it must have."""

    def run(
        *words: str, expect: int = 0, command: tuple[str, ...] = (SHARDWISE,)
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=rank_environment(),
        )
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def shardwise(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command in a process that is forked off, as are its ranks: none has to import torch."""
    context = forkserver()
    folder = tmp_path_factory.mktemp("output")
    number = itertools.count()

    def run(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        call = next(number)
        stdout, stderr = folder / f"{call}.out", folder / f"{call}.err"
        place = (stdout, stderr, rank_environment(), os.getcwd())
        process = context.Process(target=forked.command, args=(words, *place))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
        said = [path.read_text() if path.exists() else "" for path in (stdout, stderr)]
        code = process.exitcode
        assert code == expect, f"exit {code}\n{said[0]}\n{said[1]}"
        return subprocess.CompletedProcess(words, expect, *said)

    return run


@pytest.fixture(scope="session")
def losses_of() -> Callable[[Path], dict[int, float]]:
    """Loss by step, as events.jsonl records it."""

    def read(run_dir: Path) -> dict[int, float]:
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    return read


@pytest.fixture(scope="session")
def assert_golden(losses_of: Callable[[Path], dict[int, float]]) -> Callable[[str, Path], None]:
    """Compares a run's losses with the recorded ones, or records them."""

    def check(name: str, run_dir: Path) -> None:
        losses = losses_of(run_dir)
        assert list(losses) == list(range(1, 9))
        recorded = json.loads(GOLDEN.read_text())
        if os.environ.get("SHARDWISE_WRITE_GOLDEN") == "1":
            recorded[name] = list(losses.values())
            GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
        assert list(losses.values()) == pytest.approx(recorded[name], rel=1e-4)

    return check
