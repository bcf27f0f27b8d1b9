"""Runs that are looked at again and again: of each file only what is new is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from shardwise.metrics.read_events import GrowingRecord
from shardwise.report.collect import RunRecord, collect_run

# What a run directory holds that a page shows; a change of any is seen in its status.
_FILES = ("events.jsonl", "plan.json", "config.yaml", "checkpoints")
# What makes a directory a run, however little of it has been written.
TRACES = ("plan.json", "events.jsonl", "config.yaml", "launch", "logs", "checkpoints")
# Whole records are kept of so many runs: ten thousand steps take 40 MB.
_MOST_KEPT = 8
Stamp = tuple[tuple[int, int, int] | None, ...]
_Kept = TypeVar("_Kept")


class Newest(OrderedDict[str, _Kept]):
    """What was made for the last few names."""

    def kept(self, name: str, make: Callable[[], _Kept]) -> _Kept:
        """What is kept under a name, or else is made now."""
        found = self.pop(name) if name in self else make()
        self[name] = found
        while len(self) > _MOST_KEPT:
            self.popitem(last=False)
        return found


class FollowedRun:
    """One run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record = GrowingRecord(path / "events.jsonl")
        self._stamp: Stamp | None = None
        self._found: RunRecord | None = None

    def look(self) -> RunRecord:
        """The run as it is now; the same object as long as nothing has changed."""
        # Before the files are read: what changes meanwhile is seen by the next look.
        stamp = stamp_of(self._path / name for name in _FILES)
        if self._found is None or stamp != self._stamp:
            self._found, self._stamp = collect_run(self._path, self._record), stamp
        return self._found


class RunsFolder:
    """A folder of run directories, or one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._followed: Newest[FollowedRun] = Newest()

    def paths(self) -> dict[str, Path]:
        """The directory of every run that is there now, by its name."""
        if _is_run(self.path):
            return {self.path.resolve().name: self.path}
        try:
            found = sorted(path for path in self.path.iterdir() if _is_run(path))
        except OSError:  # it was removed, or is no longer ours to read
            return {}
        return {path.name: path for path in found}

    def run(self, name: str) -> RunRecord | None:
        """The run of this name; None where there is none. No name leads out of the folder."""
        path = self.paths().get(name)
        if path is None:
            return None
        return self._followed.kept(name, lambda: FollowedRun(path)).look()


def stamp_of(paths: Iterator[Path]) -> Stamp:
    """What changes when one of these files does."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_run(path: Path) -> bool:
    return not path.name.startswith(".") and any((path / name).exists() for name in TRACES)
