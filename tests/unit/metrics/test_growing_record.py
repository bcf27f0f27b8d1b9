"""A record that grows: every byte is read once, whatever lies in it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from shardwise.metrics import read_events
from shardwise.metrics.read_events import GrowingRecord, Record, read_record

LINES = [
    *(json.dumps({"event": "note", "time": 1.0, "step": step}).encode() for step in range(20)),
    b'{"event": "no',
    b"[1, 2]",
    b"",
    b'{"event": "step", "step": "three"}',
    b"\xff\x00",
]


def test_any_way_to_cut_a_file_gives_what_one_reading_gives(tmp_path: Path) -> None:
    data = b"\n".join([*LINES, b'{"event": "note", "last": true}'])
    path = tmp_path / "events.jsonl"
    for size in (1, 7, 64, len(data)):
        path.write_bytes(b"")
        growing = GrowingRecord(path)
        for begin in range(0, len(data), size):
            with path.open("ab") as file:
                file.write(data[begin : begin + size])
            found = growing.read_on()
        assert found == read_record(path, end=len(data))
        assert (len(found.events), found.num_malformed, found.first_malformed) == (22, 4, 21)


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in LINES))
    read = _counted(monkeypatch)
    growing = GrowingRecord(path)
    growing.read_on()
    assert sum(read) == path.stat().st_size
    read.clear()
    growing.read_on()
    assert sum(read) == 0
    with path.open("ab") as file:
        file.write(b'{"event": "note"}\n{"event"')
    assert len(growing.read_on().events) == 22
    assert sum(read) == len(b'{"event": "note"}\n{"event"')


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "one"}\n{"event": "two"}\n')
    growing = GrowingRecord(path)
    assert _kinds(growing.read_on()) == ["one", "two"]
    os.truncate(path, len(b'{"event": "one"}\n'))
    assert _kinds(growing.read_on()) == ["one"]
    other = tmp_path / "other"
    other.write_bytes(b'{"event": "three"}\n{"event": "four"}\n')
    other.replace(path)
    assert _kinds(growing.read_on()) == ["three", "four"]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        growing.read_on()


def _kinds(found: Record) -> list[str]:
    return [event["event"] for event in found.events]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of everything that is read through `open_file` from now on."""
    read: list[int] = []
    plainly = read_events.open_file

    class Counted(io.BufferedReader):
        def readline(self, size: Any = -1) -> bytes:
            line = super().readline(size)
            read.append(len(line))
            return line

    def opened(path: Path, max_bytes: int | None = None) -> BinaryIO:
        return Counted(plainly(path, max_bytes).detach())  # type: ignore[attr-defined]

    monkeypatch.setattr(read_events, "open_file", opened)
    return read
