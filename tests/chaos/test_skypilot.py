"""The script of a SkyPilot task with real ranks: two nodes on this machine, stopped by the task's
own hook, and recovered."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos_ranks import events_of
from slow_steps import SlowSteps
from stand_in import StandIn

from commands import rank_environment

pytestmark = [pytest.mark.dist, pytest.mark.long]

TIMEOUT_S = 300.0
CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 16}
cluster: 2x1xCPU
train: {steps: 100000, global_batch: 2, check_loss: false}
checkpoint: {every: 0}
observe: {log_every: 1}
skypilot: {volume: training}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


class TwoNodes:
    """One start of a task. The nodes have one home: ranks compare where it is."""

    def __init__(self, home: Path, task: dict[str, Any], number: int, more: dict[str, str]):
        self.task, self.more = task, more
        self.place = {
            "HOME": str(home),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": f"sky-managed-{os.getpid()}_run_1-0",
            "SKYPILOT_INTERNAL_JOB_ID": str(number),
        }
        (home / ".shardwise").mkdir(exist_ok=True)
        for where, source in task["file_mounts"].items():
            (home / where.removeprefix("~/")).write_text(Path(source).read_text())
        self.nodes = [self._start(task["run"], rank) for rank in (0, 1)]

    def _start(self, script: str, rank: int) -> subprocess.Popen[str]:
        environ = rank_environment() | self.place | self.more | self.task["envs"]
        environ["SKYPILOT_NODE_RANK"] = str(rank)
        return subprocess.Popen(
            ["bash", "-c", script],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def give_back(self) -> None:
        """What SkyPilot does on the first node before it takes the nodes away."""
        hook = self._start(self.task["config"]["hooks"][0]["run"], 0)
        hook.communicate(timeout=TIMEOUT_S)
        assert hook.returncode == 0

    def end(self) -> tuple[list[int], str]:
        said = [node.communicate(timeout=TIMEOUT_S)[0] for node in self.nodes]
        return [node.returncode for node in self.nodes], "\n".join(said)


def test_two_nodes_save_when_they_are_given_back_and_a_recovery_goes_on(
    tmp_path: Path, shardwise: Run
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    run_dir = tmp_path / "runs" / "run"
    with StandIn() as stand_in:
        given = (f"skypilot.mount={tmp_path}", f"launch.command={stand_in.path}")
        launch = ("launch", "run.yaml", "--on", "skypilot", *given)

        def start(number: int, *words: str) -> TwoNodes:
            shardwise(*launch, *words, cwd=tmp_path)
            task = yaml.safe_load((run_dir / "launch" / "task.yaml").read_text())
            return TwoNodes(tmp_path, task, number, steps.environ)

        steps = SlowSteps(tmp_path, seconds=1)
        steps.hold()
        first = start(1)
        deadline = time.monotonic() + TIMEOUT_S
        while len(events_of(run_dir, "step")) < 2:
            assert all(node.poll() is None for node in first.nodes), first.end()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first.give_back()
        # The code that `recover_on_exit_codes` names.
        codes, said = first.end()
        assert codes == [75, 75], said
        (stopped,) = events_of(run_dir, "stopped")
        steps.release()
        codes, said = start(2, f"train.stop_after={stopped['step'] + 2}").end()
        assert codes == [0, 0], said
        assert f"resumed at step {stopped['step']}" in said
