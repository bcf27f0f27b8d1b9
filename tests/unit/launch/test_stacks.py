"""Where the stacks of an aborted rank go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from forkserver import forkserver
from shardwise.launch import rank_process, worker
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE


def abort_early(folder: Path) -> None:
    """In a process of its own: be a rank that is aborted while it reads its plan."""
    os.dup2(os.open(folder / "console", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": "0", HEARTBEAT_VARIABLE: str(folder)}
    worker.Plan.load = lambda path: os.abort()  # type: ignore[method-assign]
    rank_process.start("plan.json")


def test_a_rank_that_is_aborted_while_it_reads_its_plan_spares_the_console(tmp_path: Path) -> None:
    process = forkserver().Process(target=abort_early, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGABRT
    assert "Fatal Python error" not in (tmp_path / "console").read_text()
    (stacks,) = tmp_path.glob("stacks-*")
    assert "Fatal Python error: Aborted" in stacks.read_text()
