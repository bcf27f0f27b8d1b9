"""One file of another tool, read and translated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config.rule import raise_faults
from shardwise.config.trees import read_file
from shardwise.errors import UserError
from shardwise.files import user_path, why_no_path
from shardwise.migrate.beside_file import read_given
from shardwise.migrate.key_rules import Reader, translate
from shardwise.migrate.kinds import READERS, reader_named, recognise
from shardwise.migrate.line import Line
from shardwise.migrate.settle import dump_settings, settle
from shardwise.migrate.source import Source


@dataclass(frozen=True, slots=True)
class Migration:
    """What a file became: a line for every key, and the settings that they lead to."""

    reader: Reader
    lines: list[Line]
    settings: dict[str, Any]
    yaml: str


def migrate_file(file: Path, kind: str | None, overrides: Sequence[str]) -> Migration:
    """Read a file of another tool, whose kind is told by its content unless it is given."""
    document = read_file(file)
    if document.faults:
        raise_faults(document.faults)
    if not document.tree:
        raise UserError(f"{file} is empty", fix="name a file with keys: `shardwise migrate FILE`")
    reader = reader_named(kind) if kind else recognise(document.tree, file)
    given = read_given(overrides)
    lines = list(_translated(reader, Source(reader.prepare(document.tree), file, given)))
    lines, settings = settle(lines, given)
    return Migration(reader, lines, settings, dump_settings(settings, f"{reader.title}'s {file}"))


def _translated(reader: Reader, source: Source) -> Iterator[Line]:
    """The file's own lines, and those of a file or a section of another tool that it names."""
    linked = {key: _linked(source, key) for key in reader.links}
    trees = {key: tree for key, tree in linked.items() if tree}
    inner = [
        replace(line, key=f"{key}: {line.key}")
        for key, tree in trees.items()
        for line in translate(READERS[reader.links[key]], replace(source, tree=tree))
    ]
    taken = {path for line in inner for path in line.outcome.settings}
    yield from inner
    for line in translate(reader, source, followed=trees):
        if line.outcome.fate == "assumed" and taken & set(line.outcome.settings):
            continue
        yield line


def _linked(source: Source, key: str) -> dict[str, Any] | None:
    """The tree that a key leads to: its own section, or the file that it names."""
    value = source.get(key)
    if isinstance(value, dict):
        return value
    if not isinstance(value, str) or why_no_path(value) is not None:
        return None
    for place in (user_path(value), source.file.parent / value):
        if place.is_file() and place.suffix.lower() in (".json", ".yaml", ".yml"):
            found = read_file(place)
            return found.tree if not found.faults else None
    return None
