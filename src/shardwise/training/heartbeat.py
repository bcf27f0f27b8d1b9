"""Signs of life of a rank from its first moment on, for whoever watches it.

A rank says what it is doing, and when it has made progress. The watcher only compares the last sign
with the one before, so no clock of a rank matters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

# The folder in which all ranks of a node leave their signs.
HEARTBEAT_VARIABLE = "SHARDWISE_HEARTBEATS"
# How long anything but a step may take. After that the collectives that wait for it time out as
# well.
LONG_S = 1800.0
# One rank alone, which nobody waits for, may tokenise a corpus for hours.
READING_S = 6 * 3600.0
# Signs are overwritten in place, which needs no room on a full disk.
_BLOCK_BYTES = 512


class Phase(StrEnum):
    """What a rank is doing, in words for the user."""

    IMPORTING = "importing"
    MEETING = "meeting the other ranks"
    READING = "reading data and weights"
    COMPILING = "compiling and making its first step"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    JOINING = "exchanging with other sites"
    ENDING = "ending"
    DONE = "ending after its last step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank says about itself."""

    rank: int
    pid: int
    born: int
    """When the kernel started the process: another one may get its number later."""

    phase: Phase
    beat: int
    """Another number whenever the rank has got further."""

    has_begun: bool = False
    """Whether there is a step that would be lost without a save."""

    timeout_s: float | None = None
    """`train.hang_timeout_s`, once it is known."""

    log: str = ""
    """Where the stacks of the rank go."""

    lost: int = 0
    """Signs that could not be written."""

    def allowance_s(self, timeout_s: float) -> float:
        """How long the rank may stay in its phase: `timeout_s` for a step, longer for all else."""
        if self.phase == Phase.TRAINING:
            return timeout_s
        return max(timeout_s, READING_S if self.phase == Phase.READING else LONG_S)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        data = json.dumps(asdict(self)).encode()
        return data.ljust(-(-len(data) // _BLOCK_BYTES) * _BLOCK_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sign:
        """The inverse of `to_bytes`; ValueError or TypeError where the data is no sign."""
        found: dict[str, Any] = json.loads(data)
        return cls(**{**found, "phase": Phase(found["phase"])})


class Heartbeat:
    """Writes signs to a file of this process, and does nothing where nobody watches.

    A sign that cannot be written is counted, and the file is removed: a rank without a sign is not
    judged by its last one.
    """

    def __init__(
        self,
        rank: int,
        phase: Phase = Phase.IMPORTING,
        *,
        timeout_s: float | None = None,
        log: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        pid = os.getpid()
        folder = environ.get(HEARTBEAT_VARIABLE)
        self._path = Path(folder, f"{rank}-{pid}") if folder else None
        self._file: int | None = None
        self._sign = Sign(
            rank=rank,
            pid=pid,
            born=birth_of(pid),
            phase=phase,
            beat=0,
            timeout_s=timeout_s,
            log=log,
        )
        self.beat()

    def beat(self) -> None:
        """Say that the rank has made progress."""
        self._say(beat=time.monotonic_ns())

    def enter(self, phase: Phase) -> None:
        """Begin another phase."""
        self._say(beat=time.monotonic_ns(), phase=phase)

    def begin(self) -> None:
        """Say that the first step is done: from now on there is something to save."""
        self._say(beat=time.monotonic_ns(), phase=Phase.TRAINING, has_begun=True)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Another phase while the block runs."""
        before = self._sign.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def _say(self, **changes: Any) -> None:
        if self._path is None:
            return
        self._sign = replace(self._sign, **changes)
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, self._sign.to_bytes(), 0)
        except OSError:
            self._sign = replace(self._sign, lost=self._sign.lost + 1)
            self._forget()

    def _forget(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                os.close(file)
        with suppress(OSError):
            if self._path is not None:
                self._path.unlink()


def birth_of(pid: int) -> int:
    """The start time of a process in the kernel's ticks; 0 where there is no such process."""
    return int(fields[19]) if (fields := stat_of(pid)) else 0


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
