"""Names that would confuse a reader."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_two_files_share_a_name() -> None:
    """A tab of an editor shows the name of a file, and not its room."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            places[path.name].append(str(path.relative_to(SOURCE)))
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
