"""The rank processes of one start on this machine.

They get torchrun's variables, so a rank cannot tell who started it. torchrun itself is not used
here: it imports torch before the first rank starts, and its rendezvous unpickles what any local
process writes to an open port. Ranks of one machine meet in a private file instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ExitCode
from shardwise.facts.allocator import ALLOCATOR
from shardwise.launch.console import Console
from shardwise.launch.node_path import ERROR_FILE_VARIABLE
from shardwise.launch.parent import LAUNCHER_VARIABLE
from shardwise.launch.rank_environment import RENDEZVOUS_VARIABLE
from shardwise.lease.lease import Lease
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE

TRAINING = "shardwise.launch.rank_process"
_POLL_S = 0.05
# After one rank failed, the others fail too when they next wait for it. With NCCL they would hang.
_GRACE_S = 5.0
# How long SIGKILL may take.
_KILL_S = 10.0


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    exitcode: int
    error_file: Path
    time: float


class Ranks:
    """Starts the ranks on entry. None is left when the block ends, however it ends.

    Each rank runs `python -m module` with the same arguments. Ranks that get a lease hold the run
    directory too: it is not free while one of them lives, whatever happens to the launcher.
    """

    def __init__(
        self,
        count: int,
        arguments: list[str],
        scratch: Path,
        *,
        module: str = TRAINING,
        lease: Lease | None = None,
    ) -> None:
        self.count = count
        self.heartbeats = scratch / "heartbeats"
        self.heartbeats.mkdir()
        self._scratch = scratch
        self._lease = lease
        self._command = [sys.executable, "-u", "-m", module, *arguments]
        self._console = Console()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failures: dict[int, RankFailure] = {}

    def __enter__(self) -> Ranks:
        for rank in range(self.count):
            # Each rank has a session of its own: Ctrl-C reaches only the launcher, which passes it
            # on once.
            process = subprocess.Popen(
                self._command,
                env=self._environment(rank, os.environ),
                start_new_session=True,
                pass_fds=self._lease.handles if self._lease else (),
                stdout=self._console.stdout,
            )
            self._processes.append(process)
        self._console.started()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            # The launcher does not wait for a process that is stuck in the kernel.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
        self._console.close()

    def wait(self) -> list[RankFailure]:
        """Wait until all have ended, or one has failed and the others had time to report."""
        deadline = float("inf")
        while self._note_failures() and time.monotonic() < deadline:
            if self._has_crash() and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_S
            self._console.forward()
            time.sleep(_POLL_S)
        return list(self._failures.values())

    def _note_failures(self) -> int:
        """Note failures. Returns how many ranks still run."""
        running = 0
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                running += 1
            elif code != 0 and rank not in self._failures:
                path = self._error_file(rank)
                when = path.stat().st_mtime if path.exists() else time.time()
                self._failures[rank] = RankFailure(rank, code, path, when)
        return running

    def _has_crash(self) -> bool:
        """Whether a rank has crashed. One that saved and left has not: the others leave too, in
        their own time."""
        return any(f.exitcode != ExitCode.PREEMPTED for f in self._failures.values())

    def _error_file(self, rank: int) -> Path:
        return self._scratch / f"error-{rank}.json"

    def _environment(self, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // self.count))
        defaults = dict([("OMP_NUM_THREADS", threads), ALLOCATOR])
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            # It is new for every start, so addresses of dead ranks are never read.
            LAUNCHER_VARIABLE: str(os.getpid()),
            RENDEZVOUS_VARIABLE: f"file://{self._scratch}/rendezvous",
            HEARTBEAT_VARIABLE: str(self.heartbeats),
            ERROR_FILE_VARIABLE: str(self._error_file(rank)),
        }
        return defaults | dict(inherited) | own | (self._lease.variables if self._lease else {})
