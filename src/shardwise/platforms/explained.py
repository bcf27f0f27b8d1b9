"""Plain data in which a value may carry its reason, written as YAML with the reason above it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

_WIDTH = 100
# Words that stay text without quotes for every reader of YAML, 1.1 and 1.2 alike.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NO_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"}


@dataclass(frozen=True, slots=True)
class Because:
    """A value and why it is so."""

    value: Any
    why: str


def plain(data: Any) -> Any:
    """The data without its reasons."""
    if isinstance(data, Because):
        return plain(data.value)
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [plain(value) for value in data]
    return data


def reasons_of(data: Any, place: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each explained value: where it stands, what it is, and why."""
    if isinstance(data, Because):
        yield place, plain(data.value), data.why
        yield from reasons_of(data.value, place)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from reasons_of(value, f"{place}.{key}".lstrip("."))
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for index, value in enumerate(data):
            yield from reasons_of(value, f"{place}[{index}]")


def to_yaml(*manifests: Mapping[str, Any]) -> str:
    """One document for each manifest, a comment above each value that has a reason."""
    documents = ("\n".join(_mapping(one, 0)) + "\n" for one in manifests)
    return "---\n".join(documents)


def _mapping(data: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in data.items():
        yield from _comment(value, depth)
        yield from _entry(f"{'  ' * depth}{_scalar(key)}:", _bare(value), depth)


def _sequence(data: Sequence[Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for item in data:
        yield from _comment(item, depth)
        value = _bare(item)
        if isinstance(value, Mapping) and value:
            # The first key follows the dash; its comment must stand above the dash.
            first, *others = value.items()
            yield from _comment(first[1], depth)
            yield from _entry(f"{indent}- {_scalar(first[0])}:", _bare(first[1]), depth + 1)
            yield from _mapping(dict(others), depth + 1)
        else:
            yield f"{indent}- {_inline(value)}"


def _entry(start: str, value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield start
        yield from _mapping(value, depth + 1)
    elif isinstance(value, list | tuple) and value:
        yield start
        yield from _sequence(value, depth + 1)
    elif isinstance(value, str) and _is_block(value):
        yield f"{start} |"
        yield from (f"{'  ' * (depth + 1)}{line}".rstrip() for line in value.splitlines())
    else:
        yield f"{start} {_inline(value)}"


def _comment(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, Because):
        start = f"{'  ' * depth}# "
        why = value.why.rstrip(".") + "."
        # The name of a setting stays as it is typed.
        if why.split()[0].rstrip(":").isalpha():
            why = why[0].upper() + why[1:]
        yield from (f"{start}{line}" for line in wrap(why, _WIDTH - len(start)))


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Because) else value


def _inline(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(plain(value))
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    # JSON is YAML, and leaves no doubt about what is text.
    return json.dumps(value)


def _is_block(text: str) -> bool:
    """Whether `|` can show the text: whole lines of what can be printed."""
    lines = text.splitlines()
    return (
        len(lines) > 1
        and text == "".join(f"{line}\n" for line in lines)
        and all(line.isprintable() and line == line.rstrip() for line in lines)
        and not lines[0].startswith(" ")
        and bool(lines[-1])
    )
