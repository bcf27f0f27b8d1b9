"""A foreign file as a tree and as leaves: every key that must get a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]
_INDEX = "[]"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value and the keys that lead to it. Members of a list have their index as a key."""

    path: KeyPath
    value: Any

    @property
    def key(self) -> str:
        """As a user would point at it: `datasets[0].path`."""
        return self.path[0] + "".join(
            part if part.startswith("[") else f".{part}" for part in self.path[1:]
        )

    @property
    def patterns(self) -> Iterator[str]:
        """The names under which a rule may stand, the most exact first: `a.b[].c`, `a.b[].*`."""
        parts = [_INDEX if part.startswith("[") else part for part in self.path]
        yield _join(parts)
        for end in range(len(parts) - 1, 0, -1):
            yield f"{_join(parts[:end])}.*"


@dataclass(frozen=True, slots=True)
class Source:
    """A file's tree, where it lies, and what the user said beside it, by our names."""

    tree: dict[str, Any]
    file: Path = Path("config")
    given: Mapping[str, Any] = field(default_factory=dict)

    def get(self, path: str, default: Any = None) -> Any:
        """The value at `a.b`; `default` where it is unset or not there."""

        def step(tree: Any, key: str) -> Any:
            return tree.get(key) if isinstance(tree, dict) else None

        found = reduce(step, path.split("."), self.tree)
        return default if found is None else found

    def leaves(self) -> Iterator[Leaf]:
        """Every key with a value of its own."""
        return _leaves(self.tree, ())


def _leaves(value: Any, path: KeyPath) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, f"[{index}]"))
    elif path:
        yield Leaf(path, value)


def _join(parts: list[str]) -> str:
    return "".join(
        part if part == _INDEX or not number else f".{part}" for number, part in enumerate(parts)
    )
