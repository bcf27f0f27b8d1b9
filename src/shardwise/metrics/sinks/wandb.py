"""Weights & Biases: every curve of a run, sent as it goes or kept in RUN/wandb for `wandb sync`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shardwise.files import read_tail
from shardwise.metrics.events import Event

# Below what the feed waits for a sink to close.
FINISH_S = 15.0


class WandbSink:
    """Passes events to a process that logs them. The output of that process is in
    RUN/logs/wandb.log.

    A run directory is one W&B run, so a resumed run continues its curves.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: Literal["offline", "online"],
        project: str,
        config: Mapping[str, Any],
    ) -> None:
        self._log = run_dir / "logs" / "wandb.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # The pipe is unbuffered, so nothing is left to flush when a rank ends while this waits.
            # The process has a session of its own, so Ctrl-C does not end it before the last event.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardwise.metrics.sinks.wandb_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        options = {"project": project, "name": run_dir.name, "id": run_id(run_dir), "mode": mode}
        # Offline there is nothing to go on with; `wandb sync` joins the parts by their id.
        options |= {"resume": "allow"} if mode == "online" else {}
        self._send({**options, "dir": str(run_dir), "config": dict(config)})

    def see(self, event: Event) -> None:
        """Pass one event on."""
        self._send(event)

    def close(self) -> None:
        """Let the process send what is left, within a time limit."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            code = self._process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        if code != 0:
            raise ChildProcessError(self._last_words())

    def _send(self, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode() + b"\n"
        if self._process.stdin is None:
            return
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError as error:
            self._process.wait(FINISH_S)
            raise ChildProcessError(self._last_words()) from error

    def _last_words(self) -> str:
        lines = read_tail(self._log).decode("utf-8", errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{said.strip()} (see {self._log})"


def run_id(run_dir: Path) -> str:
    """The same for the same directory, so that a restart goes on and another run does not."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
