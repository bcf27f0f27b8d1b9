"""Where data lies and what a record is, for the tools that name datasets in their files."""

from __future__ import annotations

from typing import Any

from shardwise.config.suffixes import source_of_file
from shardwise.migrate.foreign_values import Convert, text
from shardwise.migrate.key_rules import KeyRule
from shardwise.migrate.line import Outcome, changed, dropped, mapped
from shardwise.migrate.source import Source

_ONE = "the first dataset is taken: name all of them in data.mixture, with a weight for each"


def where(value: Any) -> dict[str, Any]:
    """The source and the path of a dataset: a file by its suffix, else a hub id or a directory."""
    path = text(value)
    return {"data.source": source_of_file(path) or "datasets", "data.path": path}


def first_of(section: str, key: str, rule: KeyRule) -> KeyRule:
    """A rule for members of a list, of which the first one is trained on."""

    def translate(value: Any, source: Source) -> Outcome:
        members = source.get(section)
        first = members[0] if isinstance(members, list) and members else None
        is_first = isinstance(first, dict) and first.get(key) == value
        return rule.translate(value, source) if is_first else dropped(_ONE)

    return KeyRule(translate)


def placed(why: str) -> KeyRule:
    """A rule for the path of a dataset."""
    return KeyRule(lambda value, _: mapped(where(value), why))


def formatted(convert: Convert) -> KeyRule:
    """A rule for what a record is, in the other tool's words; None where there is no such."""

    def translate(value: Any, _: Source) -> Outcome:
        found = convert(value)
        if found is None:
            return changed({}, "data.format has text, chat, prompt, instruction and auto")
        return mapped({"data.format": found}, "what a record is")

    return KeyRule(translate)
