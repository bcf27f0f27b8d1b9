"""Logs, and the lines of them that are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.doctor.check import Check, Level
from shardwise.errors import printable
from shardwise.files import read_tail

_MAX_BYTES = 4 * 2**20
# Of all logs of a run together, so that a large run is read in seconds too.
_MAX_RUN_BYTES = 64 * 2**20
_SHOWN = 240
# The attempts and ranks whose logs are read: the newest attempts, and of each the first ranks.
_ATTEMPTS = 2
_RANKS = 256


@dataclass(frozen=True, slots=True)
class LogText:
    """The end of one log."""

    name: str
    text: str


Logs = Sequence[LogText]


def read_log_file(path: Path, name: str | None = None, max_bytes: int = _MAX_BYTES) -> LogText:
    """The end of a file; OSError where it cannot be read."""
    text = read_tail(path, max_bytes).decode("utf-8", errors="replace")
    return LogText(name or path.name, text)


def read_run_logs(run: Path) -> list[LogText]:
    """The logs of a run's newest attempts. A log that cannot be read is left out."""
    attempts = sorted(run.glob("logs/attempt-*"), key=_number, reverse=True)[:_ATTEMPTS]
    paths = [
        path
        for attempt in attempts
        for path in sorted(attempt.glob("rank-*.log"), key=_number)[:_RANKS]
    ]
    each = min(_MAX_BYTES, _MAX_RUN_BYTES // max(1, len(paths)))
    found = []
    for path in paths:
        try:
            found.append(read_log_file(path, f"{path.parent.name}/{path.name}", each))
        except OSError:
            continue
    return found


def sign(
    name: str,
    level: Level,
    title: str,
    pattern: str,
    why: str,
    fix: str,
    *,
    follows: bool = False,
) -> Check[Logs]:
    """A check for lines with this pattern. A pattern begins with plain letters, so that long logs
    are searched fast."""
    return Check(name, level, title, why, fix, _finder(re.compile(pattern)), follows)


def _finder(pattern: re.Pattern[str]) -> Callable[[Logs], Iterator[str]]:
    def look(logs: Logs) -> Iterator[str]:
        found = [(log, match) for log in logs if (match := pattern.search(log.text)) is not None]
        if not found:
            return
        log, match = found[0]
        start = log.text.rfind("\n", 0, match.start()) + 1
        end = log.text.find("\n", match.start())
        line = printable(log.text[start : end if end >= 0 else len(log.text)].strip())
        if len(line) > _SHOWN:
            at = max(0, min(match.start() - start - 40, len(line) - _SHOWN))
            line = f"…{line[at : at + _SHOWN]}…"
        others = f" (and in {len(found) - 1} other logs)" if len(found) > 1 else ""
        yield f"{log.name}, line {log.text.count(chr(10), 0, start) + 1}: {line}{others}"

    return look


def _number(path: Path) -> int:
    digits = re.search(r"\d+", path.name)
    return int(digits[0]) if digits else -1
