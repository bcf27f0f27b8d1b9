"""Files of JSON as records: lines, and lists."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import json_files
from shardwise.data.json_files import read_records
from shardwise.data.records import CorruptRecord

RECORDS = [{"text": f"{'é' * number}, [{{]}}\\"} for number in range(50)]


def read(path: Path, max_bytes: int = 2**20) -> list[tuple[str, Any]]:
    found = read_records(path, max_bytes)
    return [
        (name, str(record) if isinstance(record, CorruptRecord) else record)
        for name, record in found
    ]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece", [3, 2**20])
def test_a_list_has_the_records_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, piece: int
) -> None:
    """However it is laid out, and wherever the pieces of it end that are read."""
    monkeypatch.setattr(json_files, "_PIECE", piece)
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(RECORDS, indent=indent).encode())
    expected = [(f"{path}:{number}", record) for number, record in enumerate(RECORDS, start=1)]
    assert read(path) == expected
    packed = tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [record for _, record in read(packed)] == RECORDS
    lines = tmp_path / "c.json"
    lines.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    assert [record for _, record in read(lines)] == RECORDS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[]", []),
        (b'[{"a": 1}, 7]', [{"a": 1}, "not an object but int"]),
        (b'[{"a": 1}, {"b": ', [{"a": 1}, "invalid JSON"]),
        (b'[{"a": 1}, nonsense]', [{"a": 1}, "invalid JSON"]),
        (b'[{"a": 1}', [{"a": 1}, "invalid JSON"]),
        (b'[{"a": 1}] {"b": 2}', [{"a": 1}, "text follows the end of the list"]),
        (b'[{"a": "\xff"}]', ["invalid UTF-8"]),
        (b'[{"a": 1}, {"b": "' + b"x" * 2**21 + b'"}]', [{"a": 1}, "it is longer than 1.0 MiB"]),
        (b"[" * 99_999, ["invalid JSON (it is nested too deeply)"]),
        (b'[{"a": ' + b"9" * 9_999 + b"}]", ["invalid JSON (a number of thousands of digits)"]),
    ],
)
def test_what_is_wrong_in_a_list_is_named(tmp_path: Path, text: bytes, says: list[Any]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    found = read(path)
    assert [name for name, _ in found] == [f"{path}:{n}" for n in range(1, len(says) + 1)]
    for (_, record), expected in zip(found, says, strict=True):
        assert record == expected or str(record).startswith(str(expected))
