"""Where the stacks of an aborted rank go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from shardwise.training.heartbeat import HEARTBEAT_VARIABLE

ABORTED_EARLY = """
import os
from shardwise.launch import rank, worker
worker.Plan.load = lambda path: os.abort()
rank.start("plan.json")
"""


def test_a_rank_that_is_aborted_while_it_reads_its_plan_spares_the_console(tmp_path: Path) -> None:
    rank = subprocess.run(
        [sys.executable, "-c", ABORTED_EARLY],
        env={**os.environ, "RANK": "0", HEARTBEAT_VARIABLE: str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert rank.returncode == -signal.SIGABRT
    assert "Fatal Python error" not in rank.stderr
    (stacks,) = tmp_path.glob("stacks-*")
    assert "Fatal Python error: Aborted" in stacks.read_text()
