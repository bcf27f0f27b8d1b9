"""OmegaConf's references within a file, `${output_dir}/logs`, put in place."""

from __future__ import annotations

import re
from typing import Any

from shardwise.migrate.source import Source

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LONGEST = 4096  # characters of a text with references: a few could else fill the memory


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with `${output_dir}` and the like in place, as far as they lead to plain values."""
    source = Source(tree)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        return _filled_text(value, source) if isinstance(value, str) else value

    return {key: filled(value) for key, value in tree.items()}


def _filled_text(words: str, source: Source) -> Any:
    """A reference may lead to another one; three in a row are more than any file has."""
    for _ in range(3):
        if len(words) > _LONGEST:
            break
        whole_match = _REFERENCE.fullmatch(words)
        if whole_match:
            found = source.get(whole_match[1])
            if not isinstance(found, str):
                return words if found is None or isinstance(found, dict | list) else found
            words = found
        else:
            words = _REFERENCE.sub(lambda match: _plain(match, source), words)
    return words


def _plain(match: re.Match[str], source: Source) -> str:
    found = source.get(match[1])
    return match[0] if found is None or isinstance(found, dict | list) else str(found)[:_LONGEST]
