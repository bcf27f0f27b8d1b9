"""events.jsonl, read with limits. Malformed lines are counted."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.files import bounded_lines, open_file, parse_json
from shardwise.metrics.shapes import is_event, is_whole

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
    events: list[Event] = []
    whole: list[Event] = []
    num_lines, first_malformed = 0, None
    with open_file(path, _MAX_BYTES) as file:
        stream: BinaryIO = file if end is None else io.BytesIO(file.read(end))
        for number, line in enumerate(bounded_lines(stream, _MAX_LINE_BYTES), start=1):
            if not line.strip():
                continue
            num_lines += 1
            event = _parse_event(line)
            if event is not None:
                events.append(event)
            if event is not None and is_whole(event):
                whole.append(event)
            elif first_malformed is None:
                first_malformed = number
    return Record(events, whole, num_lines, first_malformed)


def read_events(path: Path, *, end: int | None = None) -> list[Event]:
    """The events of a record without its malformed lines, for callers that do not report these."""
    return read_record(path, end=end).events


def read_whole_events(path: Path, *, end: int | None = None) -> list[Event]:
    """The whole events of a record, for callers that do not report the others."""
    return read_record(path, end=end).whole


def _parse_event(line: bytes) -> Event | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if is_event(found) else None
