"""Lines become settings that hold together, and a YAML file.

What the loader of our configuration refuses is taken out again, and its line says why: a file of
another tool may hold values that no run could have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from shardwise.config.load import load_config
from shardwise.config.schema_text import section_classes, show_value
from shardwise.config.trees import YamlDumper
from shardwise.errors import UserError, printable
from shardwise.migrate.line import Line, Outcome

# What others are judged by comes first.
_FIRST = (
    *("train.steps", "adapter.method", "data.source", "data.path"),
    *("preference.objective", "data.format"),
)


def settle(lines: Sequence[Line], given: Mapping[str, Any]) -> tuple[list[Line], dict[str, Any]]:
    """The lines with what became of their settings, and all settings by path. What the user gave
    wins over the file."""
    kept, settings = _without_conflicts(lines, given)
    if _why_refused(settings) is None:
        return kept, settings
    sound: dict[str, Any] = dict(given)
    reasons: dict[str, str] = {}
    for group in sorted(_groups(kept, settings, given), key=_turn):
        # A line's settings may need each other, so they are tried together first.
        if _why_refused({**sound, **group}) is None:
            sound |= group
            continue
        for path, value in group.items():
            why = _why_refused({**sound, path: value})
            if why is None:
                sound[path] = value
            else:
                reasons[path] = why
    return [_without(line, reasons) for line in kept], sound


def _groups(
    lines: Sequence[Line], settings: Mapping[str, Any], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The settings of each line, without those of lines before it."""
    seen = set(given)
    groups = []
    for line in lines:
        new = [path for path in line.outcome.settings if path not in seen]
        seen.update(new)
        groups.append({path: settings[path] for path in new})
    return groups


def _turn(group: Mapping[str, Any]) -> int:
    return min((_FIRST.index(path) for path in group if path in _FIRST), default=len(_FIRST))


def dump_settings(settings: Mapping[str, Any], origin: str) -> str:
    """A YAML file, in the order of our sections."""
    tree: dict[str, Any] = {}
    for path in sorted(settings, key=_place):
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = settings[path]
    body = yaml.dump(tree, Dumper=YamlDumper, sort_keys=False, allow_unicode=True) if tree else ""
    return f"# From {printable(origin)}, by `shardwise migrate`.\n{body}"


def _place(path: str) -> int:
    section = path.rpartition(".")[0]
    return list(section_classes()).index(section) if section else -1


def _without_conflicts(
    lines: Sequence[Line], given: Mapping[str, Any]
) -> tuple[list[Line], dict[str, Any]]:
    settings: dict[str, Any] = dict(given)
    sayer = dict.fromkeys(given, "the command line")
    kept = []
    for line in lines:
        clashes = {
            path: f"{sayer[path]} says {path}={show_value(settings[path])}"
            for path, value in line.outcome.settings.items()
            if path in settings and settings[path] != value
        }
        for path, value in line.outcome.settings.items():
            settings.setdefault(path, value)
            sayer.setdefault(path, line.key)
        kept.append(_without(line, clashes))
    return kept, settings


def _without(line: Line, reasons: Mapping[str, str]) -> Line:
    """The line without the settings that have a reason against them."""
    found = [reasons[path] for path in line.outcome.settings if path in reasons]
    if not found:
        return line
    left = {path: val for path, val in line.outcome.settings.items() if path not in reasons}
    outcome = Outcome(
        "changed" if left else "dropped",
        "; ".join(dict.fromkeys(found)),
        left,
        line.outcome.is_other_task or "preference.objective" in reasons,
    )
    return replace(line, outcome=outcome)


def _why_refused(settings: Mapping[str, Any]) -> str | None:
    try:
        load_config(None, [as_override(path, value) for path, value in settings.items()])
    except UserError as error:
        lines = error.what.splitlines()
        told = lines[1] if len(lines) > 1 else lines[0]
        return printable(told.strip().split("': ", 1)[-1])
    return None


def as_override(path: str, value: Any) -> str:
    """A setting as a user types it."""
    return f"{path}={json.dumps(value, ensure_ascii=False)}"
