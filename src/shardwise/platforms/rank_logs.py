"""The logs of all ranks as one, in the order of time.

Lines of Python's logging, of PyTorch and of NCCL carry a time in one of a few forms. A line without
one belongs to the line before it. Rank 0 also prints the lines of steps: their times are in
events.jsonl.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import printable
from shardwise.files import open_file, read_tail
from shardwise.metrics.log_header import node_of
from shardwise.metrics.read_events import Event

_ISO = re.compile(r"\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
# PyTorch's own: `[W1118 16:06:03.123456 file.cpp:12]`, with neither year nor zone.
_GLOG = re.compile(r"\[?[rank\d: \[\]]*[IWEFV](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})")
_STEP = re.compile(r"step +(\d+)/\d+ ")
_FILE = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of one rank."""

    time: float
    rank: int
    node: str
    """Where the rank runs; empty where its log does not say."""

    text: str

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        where = f"{self.rank} {self.node}" if self.node else f"{self.rank}"
        return f"{at} [{where}] {printable(self.text)}"


def newest_attempt(run_dir: Path) -> Path | None:
    """The folder with the logs of the last start; None before the first."""
    found = [path for path in (run_dir / "logs").glob("attempt-*") if path.name[8:].isdecimal()]
    return max(found, key=lambda path: int(path.name[8:]), default=None)


def rank_files(attempt: Path) -> dict[int, Path]:
    """The log of each rank."""
    matches = ((_FILE.fullmatch(path.name), path) for path in attempt.glob("rank-*.log"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match is not None))


def nodes_of_ranks(attempt: Path) -> dict[int, str]:
    """The node of each rank, from the first line of its log."""
    found = {}
    for rank, path in rank_files(attempt).items():
        with open_file(path) as file:
            node = node_of(file.readline(4096).decode(errors="replace"))
        if node is not None:
            found[rank] = node
    return found


def merged_lines(attempt: Path, events: Iterable[Event] = ()) -> list[LogLine]:
    """The tails of all logs of one start, in the order of time."""
    nodes, steps = nodes_of_ranks(attempt), _times_of_steps(events)
    streams = []
    for rank, path in rank_files(attempt).items():
        lines = read_tail(path).decode(errors="replace").splitlines()
        began = path.stat().st_mtime if not lines else 0.0
        streams.append(_timed(lines, rank, nodes.get(rank, ""), began, steps))
    return list(heapq.merge(*streams, key=lambda line: line.time))


def _timed(
    lines: Iterable[str], rank: int, node: str, began: float, steps: Mapping[int, float]
) -> Iterator[LogLine]:
    last = began
    for text in lines:
        # A clock that was set back does not tear a log apart.
        last = max(last, _time_of(text, last) or _step_time(text, steps) or 0.0)
        yield LogLine(time=last, rank=rank, node=node, text=text)


def _time_of(text: str, near: float) -> float | None:
    """The time that a line begins with, in this machine's zone."""
    if (found := _ISO.match(text)) is not None:
        day, clock, part = found.groups()
        form = "%Y-%m-%d %H:%M:%S"
        return _seconds(f"{day} {clock}", form, part)
    if (found := _GLOG.match(text)) is not None:
        month, number, clock, part = found.groups()
        year = time.localtime(near or None).tm_year
        return _seconds(f"{year}-{month}-{number} {clock}", "%Y-%m-%d %H:%M:%S", part)
    return None


def _seconds(text: str, form: str, part: str | None) -> float | None:
    try:
        whole = time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{part}") if part else 0.0)


def _step_time(text: str, steps: Mapping[int, float]) -> float | None:
    found = _STEP.match(text)
    return None if found is None else steps.get(int(found[1]))


def _times_of_steps(events: Iterable[Event]) -> dict[int, float]:
    """When each logged step was printed, the last time that it was made."""
    return {
        event["step"]: float(event["time"])
        for event in events
        if event["event"] == "step"
        and isinstance(event.get("step"), int)
        and isinstance(event.get("time"), int | float)
    }
