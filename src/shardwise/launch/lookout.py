"""The ranks of a node as seen from outside: by their signs, and by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.training.heartbeat import Sign, stat_of

# States of /proc/PID/stat in which only the name of the process is left.
_GONE = ("", "Z", "X", "x")
# Stopped by a signal, or by a debugger.
_STOPPED = ("T", "t")
# Inside a system call that no signal ends.
_STUCK = "D"


@dataclass(frozen=True, slots=True)
class Seen:
    """A living rank."""

    rank: int
    pid: int
    state: str
    sign: Sign | None
    """Its last sign; None before it has left one, and where it cannot."""

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped until someone continues it."""
        return self.state in _STOPPED

    @property
    def is_stuck(self) -> bool:
        """Whether it is inside the kernel, for example in a read from a disk that does not
        answer."""
        return self.state == _STUCK

    @property
    def has_begun(self) -> bool:
        """Whether it is known to have steps that only a save keeps."""
        return self.sign is not None and self.sign.has_begun


class Lookout:
    """Finds the ranks by the signs in a folder, and as children of a launcher."""

    def __init__(self, folder: Path, launcher: int | None = None) -> None:
        self._folder = folder
        self._launcher = launcher
        self._children: dict[int, int | None] = {}

    def look(self) -> list[Seen]:
        """The living ranks, in order."""
        signs = {sign.pid: sign for sign in self.signs()}
        ranks = {sign.pid: sign.rank for sign in signs.values()} | dict(self._find_children())
        found = []
        for pid, rank in ranks.items():
            stat, sign = stat_of(pid), signs.get(pid)
            state, born = (stat[0], int(stat[19])) if stat else ("", 0)
            if state not in _GONE and (sign is None or sign.born == born):
                found.append(Seen(rank, pid, state, sign))
        return sorted(found, key=lambda seen: (seen.rank, seen.pid))

    def signs(self) -> Iterator[Sign]:
        """The signs of all ranks, also of those that have ended. Other files in the folder are
        skipped."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            if not name.replace("-", "", 1).isdecimal():
                continue
            try:
                yield Sign.from_bytes((self._folder / name).read_bytes())
            except (OSError, ValueError, TypeError, KeyError):
                continue  # half written, or not a rank's: the next look may know more

    def newest_signs(self) -> dict[int, Sign]:
        """Signs by rank, of the last start."""
        signs = sorted(self.signs(), key=lambda sign: sign.beat)
        return {sign.rank: sign for sign in signs}

    def _find_children(self) -> Iterator[tuple[int, int]]:
        """(process, rank) of the launcher's children. This finds ranks that have left no sign
        yet."""
        if self._launcher is None:
            return
        for pid in _children_of(self._launcher):
            # Between fork and exec a child still shows its parent's variables.
            if self._children.get(pid) is None:
                self._children[pid] = _rank_of(pid)
            if (rank := self._children[pid]) is not None:
                yield pid, rank


def _children_of(pid: int) -> Iterator[int]:
    tasks = Path(f"/proc/{pid}/task")
    # `Path.glob` would raise where a thread of the launcher ends while it looks.
    with suppress(OSError):
        for task in os.listdir(tasks):
            with suppress(OSError):
                children = (tasks / task / "children").read_text(encoding="ascii")
                yield from map(int, children.split())


def _rank_of(pid: int) -> int | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    said = next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), b"")
    return int(said) if said.isdigit() else None
