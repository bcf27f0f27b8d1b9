"""JSON as a record, or the reason why it is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.units import format_bytes


class CorruptRecord(ValueError):
    """A record that cannot be used: the reason, by which records are counted, and its details."""

    fix = "mend the records"

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason} ({details})" if details else reason)
        self.reason = reason


@contextmanager
def valid_json() -> Iterator[None]:
    """Inside, text that is no JSON is a CorruptRecord."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise CorruptRecord("invalid UTF-8") from error
    except json.JSONDecodeError as error:
        raise CorruptRecord("invalid JSON", str(error)) from error
    except ValueError as error:  # Python converts no number of more than 4300
        raise CorruptRecord("invalid JSON", "a number of thousands of digits") from error
    except RecursionError as error:
        raise CorruptRecord("invalid JSON", "it is nested too deeply") from error


def parse_record(line: bytes, max_bytes: int) -> dict[str, Any]:
    """The object of one line, which was cut at `max_bytes` where it was longer."""
    if len(line) >= max_bytes:
        raise CorruptRecord(f"it is longer than {format_bytes(max_bytes)}")
    with valid_json():
        record = json.loads(line.decode("utf-8-sig"))
    return object_of(record)


def object_of(record: Any) -> dict[str, Any]:
    """The same, which must be an object."""
    if not isinstance(record, dict):
        raise CorruptRecord(f"not an object but {type(record).__name__}")
    return record


def valid_text(value: object, field: str) -> str:
    """The value as text that a tokenizer can encode."""
    if not isinstance(value, str):
        raise CorruptRecord(f"{field!r} is not a string but {type(value).__name__}")
    try:
        # JSON can spell half of a surrogate pair, which no tokenizer can encode.
        value.encode()
    except UnicodeEncodeError as error:
        raise CorruptRecord(f"{field!r} holds a lone surrogate") from error
    return value
