"""Files of JSON: a record on each line, or one list of records."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config.suffixes import without_compression
from shardwise.data.compressed import open_bytes
from shardwise.data.records import CorruptRecord, object_of, parse_record, valid_json
from shardwise.files import bounded_lines
from shardwise.units import format_bytes

# A record, or why it is none; and its name.
Record = dict[str, Any] | CorruptRecord
Named = tuple[str, Record]

_PIECE = 2**20
_BETWEEN = re.compile(r"[\s,]*")


def read_records(path: Path, max_bytes: int) -> Iterator[Named]:
    """All records of a file. A name has the line, or the place in the list.

    A file is one list where its name ends in `.json` and its text begins with a bracket. What is
    wrong in a line costs that line, and what is wrong in a list costs the rest of it.
    """
    read = _items if _is_list(path) else _lines
    for number, record in read(path, max_bytes):
        yield f"{path}:{number}", record


def _is_list(path: Path) -> bool:
    if not without_compression(path.name).endswith(".json"):
        return False
    with open_bytes(path) as stream:
        start = stream.read(4096)
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, Record]]:
    # Lines are read as bytes, so a line that is not UTF-8 does not spoil those after it.
    with open_bytes(path) as stream:
        for number, line in enumerate(bounded_lines(stream, max_bytes), start=1):
            if line.strip():
                yield number, _or_reason(partial(parse_record, line, max_bytes))


def _items(path: Path, max_bytes: int) -> Iterator[tuple[int, Record]]:
    number = 1
    with open_bytes(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        try:
            for item in _decoded(text.read, max_bytes):
                yield number, _or_reason(partial(object_of, item))
                number += 1
        except CorruptRecord as reason:
            yield number, reason
        text.detach()


def _or_reason(read: Callable[[], dict[str, Any]]) -> Record:
    try:
        return read()
    except CorruptRecord as reason:
        return reason


def _decoded(read: Callable[[int], str], max_bytes: int) -> Iterator[Any]:
    """The items of a list, of which a piece is in memory at a time. Raises CorruptRecord where the
    text goes on as no list does."""
    decoder = json.JSONDecoder()
    with valid_json():
        text = read(_PIECE)
    at = text.index("[") + 1
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            if text[at + 1 :].strip() or read(_PIECE).strip():
                raise CorruptRecord("text follows the end of the list")
            return
        try:
            with valid_json():
                item, at = decoder.raw_decode(text, at)
        except CorruptRecord:
            if len(text) - at > max_bytes:
                raise CorruptRecord(f"it is longer than {format_bytes(max_bytes)}") from None
            # As much again, so that a long item is looked at few times.
            with valid_json():
                more = read(max(_PIECE, len(text) - at))
            if not more:
                raise
            text, at = text[at:] + more, 0
            continue
        yield item
