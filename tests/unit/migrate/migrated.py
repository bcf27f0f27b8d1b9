"""Small files of other tools, written here, and what they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from shardwise.migrate.line import Line
from shardwise.migrate.migration import Migration, migrate_file


def migrated(folder: Path, tree: Any, *overrides: str, name: str = "other.yaml") -> Migration:
    """The migration of a tree, after a check that every key has its line."""
    file = folder / name
    file.write_text(json.dumps(tree) if name.endswith("json") else yaml.safe_dump(tree))
    return migrate_file(file, None, overrides)


def lines_of(done: Migration) -> dict[str, Line]:
    return {line.key: line for line in done.lines}


def fate(done: Migration, key: str) -> str:
    return lines_of(done)[key].outcome.fate


def why(done: Migration, key: str) -> str:
    return lines_of(done)[key].outcome.why
