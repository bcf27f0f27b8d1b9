"""A run on a real Ray: a worker and then the driver are killed, it resumes, and it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import RAY, parent_of, processes_with, ray_cluster, ray_environment

from commands import SHARDWISE

pytestmark = [
    pytest.mark.long,
    pytest.mark.dist,
    pytest.mark.skipif(
        not RAY.is_dir(), reason="Ray is not in .venv/ray: `make chaos` puts it there"
    ),
]
CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 32}
cluster: 2x1xCPU
shard: {strategy: full_shard}
train: {steps: 200, global_batch: 4}
checkpoint: {every: 10}
observe: {log_every: 1}
"""
# Of one start: on a busy machine Ray takes minutes to place and to import.
LONG_S = 1800.0


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with ray_cluster() as address:
        yield address


class User:
    """Types commands in a folder, where RAY_ADDRESS names the cluster."""

    def __init__(self, folder: Path, dashboard: str) -> None:
        self._folder = folder
        self._environ = ray_environment() | {"RAY_ADDRESS": dashboard}
        (folder / "run.yaml").write_text(CONFIG)

    def types(self, *words: str) -> str:
        done = subprocess.run(
            [SHARDWISE, *words],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def waits(self, run: str, states: set[str]) -> dict[str, object]:
        """Until Ray says so. Each question imports Ray, which takes seconds."""
        deadline = time.monotonic() + LONG_S
        while True:
            found = json.loads(self.types("status", run, "--json"))
            if found["state"] in states:
                return dict(found)
            assert time.monotonic() < deadline, self.types("logs", run, "--lines", "200")
            time.sleep(3)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    saved = (run_dir / "checkpoints").glob("step-*")
    return max((int(one.name.removeprefix("step-")) for one in saved), default=0)


def losses(run_dir: Path) -> dict[int, float]:
    """By step; of a step that was made twice, what the last start has made."""
    return {one["step"]: one["loss"] for one in events(run_dir) if one["event"] == "step"}


def events(run_dir: Path) -> list[dict[str, Any]]:
    # The last line of a run that goes on may be half of one.
    whole = (run_dir / "events.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def test_a_killed_worker_and_a_killed_driver(tmp_path: Path, dashboard: str) -> None:
    user, run_dir = User(tmp_path, dashboard), tmp_path / "runs" / "run"
    launch = ("launch", "run.yaml", "--on", "ray", "--submit")
    assert "submitted: ray job run-" in user.types(*launch)
    wait_for(lambda: newest(run_dir) > 0)

    agents = processes_with("torchrun", f"{run_dir}/launch/run.yaml", "--node-rank=1")
    workers = {parent_of(pid) for pid in agents} - set(agents)
    assert len(workers) == 1
    os.kill(workers.pop(), signal.SIGKILL)
    wait_for(lambda: (run_dir / "logs" / "attempt-2").exists())
    before = newest(run_dir)
    wait_for(lambda: newest(run_dir) > before)

    for pid in processes_with("ray-driver", f"{run_dir}/launch/ray.yaml"):
        os.kill(pid, signal.SIGKILL)
    assert user.waits("run", {"failed", "ended", "stopped"})["state"] == "failed"
    assert len(losses(run_dir)) < 200

    user.types(*launch)
    user.waits("run", {"ended"})
    user.types("train", "run.yaml", "name=plain", "cluster.name=2xCPU")
    assert losses(run_dir) == losses(tmp_path / "runs" / "plain")


def test_a_stop_saves(tmp_path: Path, dashboard: str) -> None:
    user, run_dir = User(tmp_path, dashboard), tmp_path / "runs" / "stopped"
    words = ("name=stopped", "train.steps=100000", "checkpoint.every=0")
    user.types("launch", "run.yaml", "--on", "ray", "--submit", *words)
    wait_for(lambda: (run_dir / "events.jsonl").exists() and len(losses(run_dir)) > 2)
    assert "asked to stop" in user.types("stop", "stopped")
    assert user.waits("stopped", {"failed", "ended", "stopped"})["state"] == "stopped"
    assert newest(run_dir) == max(losses(run_dir))


def test_an_elastic_run_goes_on_with_the_node_that_is_left(tmp_path: Path, dashboard: str) -> None:
    """It comes last, because it ends a node of the cluster."""
    user, run_dir = User(tmp_path, dashboard), tmp_path / "runs" / "fewer"
    user.types("launch", "run.yaml", "--on", "ray", "--submit", "name=fewer", "launch.elastic=true")
    wait_for(lambda: newest(run_dir) > 0)
    for pid in set(processes_with("raylet/raylet")) - set(
        processes_with("raylet/raylet", "--head")
    ):
        os.kill(pid, signal.SIGKILL)
    assert user.waits("fewer", {"failed", "ended"})["state"] == "ended"
    starts = [one["world_size"] for one in events(run_dir) if one["event"] == "start"]
    assert starts[0] == 2 and starts[-1] == 1
    user.types("train", "run.yaml", "name=plain", "cluster.name=2xCPU")
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "runs" / "plain"), abs=1e-5)
