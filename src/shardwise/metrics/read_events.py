"""events.jsonl, read with limits. Malformed lines are counted."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shardwise.files import bounded_lines, open_file, parse_json
from shardwise.metrics.event_fields import is_event, is_whole

Event = dict[str, Any]
# A million logged steps are below one gigabyte, and a line is below a hundred kilobytes.
_MAX_BYTES = 2**31
_MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Record:
    """The events of events.jsonl, and how many of its lines cannot be used."""

    events: list[Event]
    """Every line that is an event."""

    whole: list[Event]
    """Events that have the fields of their kind, for code that computes with them."""

    num_lines: int
    first_malformed: int | None
    """The number of the first line that is not a whole event. A kill has cut it off, or the file
    was changed."""

    @property
    def num_malformed(self) -> int:
        """The number of lines that are not whole events."""
        return self.num_lines - len(self.whole)

    @property
    def fault(self) -> str:
        """The malformed lines in words; empty where there are none."""
        if not self.num_malformed:
            return ""
        lines = f"{self.num_malformed} of {self.num_lines} lines of events.jsonl"
        return f"{lines} are malformed; the first is line {self.first_malformed}"


def read_record(path: Path, *, end: int | None = None) -> Record:
    """The record of a run, or the first `end` bytes of it; OSError where it cannot be read."""
    if end is None:
        return GrowingRecord(path).read_on()
    with open_file(path, _MAX_BYTES) as file:
        lines = _Lines()
        for line in bounded_lines(io.BytesIO(file.read(end)), _MAX_LINE_BYTES):
            lines.take(line)
    return lines.record()


class GrowingRecord:
    """The record of a run that goes on: each call reads only what was written since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._read_bytes = 0
        self._lines = _Lines()

    def read_on(self) -> Record:
        """Everything that was written so far; OSError where it cannot be read."""
        with open_file(self._path, _MAX_BYTES) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._read_bytes:
                # Another file is there now, or this one was cut.
                self._file, self._read_bytes, self._lines = found.st_ino, 0, _Lines()
            return self._take_from(file)

    def _take_from(self, file: IO[bytes]) -> Record:
        file.seek(self._read_bytes)
        for line in bounded_lines(file, _MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                # The rest of it may still come, so it is read again then.
                self._read_bytes = file.tell() - len(line)
                return self._lines.record(line)
            self._lines.take(line)
        self._read_bytes = file.tell()
        return self._lines.record()


class _Lines:
    """What was made of the lines so far."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._whole: list[Event] = []
        self._number = self._num_lines = 0
        self._first_malformed: int | None = None

    def take(self, line: bytes) -> None:
        """One more line."""
        self._number += 1
        if not line.strip():
            return
        self._num_lines += 1
        event = parse_event(line)
        if event is not None:
            self._events.append(event)
        if event is not None and is_whole(event):
            self._whole.append(event)
        elif self._first_malformed is None:
            self._first_malformed = self._number

    def record(self, unfinished: bytes = b"") -> Record:
        """The record up to here, with a last line that has no end yet."""
        found = _Lines()
        found._events, found._whole = [*self._events], [*self._whole]
        found._number, found._num_lines = self._number, self._num_lines
        found._first_malformed = self._first_malformed
        found.take(unfinished)
        return Record(found._events, found._whole, found._num_lines, found._first_malformed)


def read_events(path: Path, *, end: int | None = None) -> list[Event]:
    """The events of a record without its malformed lines, for callers that do not report these."""
    return read_record(path, end=end).events


def read_whole_events(path: Path, *, end: int | None = None) -> list[Event]:
    """The whole events of a record, for callers that do not report the others."""
    return read_record(path, end=end).whole


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None where it is none."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if is_event(found) else None
