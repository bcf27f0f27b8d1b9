"""Commands as tests start them: installed ones, and the same in processes that are forked off.

A command that is forked off a server has torch imported, and so have its ranks, which it forks in
turn. It is the same code. What is about the start of processes, about imports or about launchers
themselves takes the installed command.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from forkserver import forkserver
from signalled import Signalled

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
TIMEOUT_S = 240
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = itertools.count()


def rank_environment() -> dict[str, str]:
    """One thread a rank, so that sums are the same on every machine's number of cores; and no
    variable of another launcher."""
    kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHERS}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Command(Signalled):
    """`shardwise WORDS`, forked off. It has as much of subprocess.Popen as tests use."""

    def __init__(
        self,
        words: Sequence[str | Path],
        stdout: Path,
        stderr: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        module: str = "shardwise",
    ) -> None:
        import forked  # It imports torch, which not every test needs.

        place = (stdout, stderr or stdout, environ or rank_environment(), str(folder or Path.cwd()))
        self._process = forkserver().Process(
            target=forked.command, args=(module, [str(word) for word in words], *place)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("shardwise", timeout or 0.0)
        return self._process.exitcode


def run_forked(
    folder: Path,
    *words: str | Path,
    expect: int = 0,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    module: str = "shardwise",
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, its output in `folder`; `expect` is the exit code it must have."""
    number = next(_NUMBERS)
    stdout, stderr = folder / f"{number}.out", folder / f"{number}.err"
    command = Command(words, stdout, stderr, environ=environ, folder=cwd, module=module)
    try:
        command.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        command.kill()
    said = [path.read_text() if path.exists() else "" for path in (stdout, stderr)]
    code = command.returncode
    assert code == expect, f"exit {code}\n{said[0]}\n{said[1]}"
    return subprocess.CompletedProcess(words, expect, *said)


def run_installed(
    *words: str,
    expect: int = 0,
    command: Sequence[str] = (SHARDWISE,),
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The installed command, or another, in the same way."""
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=dict(environ or rank_environment()),
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
