"""Text becomes a RunConfig here and nowhere else. Every fault is reported with its place.

A file is read into flat values, `(section, field) -> value`, each with the place it came from.
Overrides are laid over them, pydantic checks each value against the type of its field, and rules.py
checks them together. pydantic is imported only when there is something to check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from shardwise.config.plain import assemble
from shardwise.config.rule import Fault, raise_faults
from shardwise.config.rules import validate_rules
from shardwise.config.schema import FROM_STRING, RunConfig
from shardwise.config.schema_text import (
    TOP_LEVEL,
    default_setting,
    field_path,
    field_types,
    hint_for_key,
    section_classes,
    shorten,
    show_value,
    words_for_type,
)
from shardwise.config.suffixes import source_of_file
from shardwise.config.trees import MAX_DEPTH, ConfigTree, KeyPath, read_file, read_yaml
from shardwise.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML, TOML or JSON file, lay `a.b=v` overrides over it, and check everything.

    Without a file there are only the overrides.
    """
    file = Path(path or "run")
    said = _flatten(ConfigTree({}) if path is None else read_file(file), str(file))
    for override in _join_flags(overrides):
        _apply_override(said, override)
    said.values.setdefault((TOP_LEVEL, "name"), file.stem)
    config = assemble(_checked_values(said))
    validate_rules(config, said.place_of)
    return config


# ---- trees become flat values ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    """What the user said, by (section, field), and where each thing was said."""

    file: str
    faults: list[Fault]
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)

    def say(self, section: str, name: str, value: Any, place: str) -> None:
        self.values[section, name] = value
        self.places[section, name] = place

    def place_of(self, path: str) -> str:
        section, _, name = path.rpartition(".")
        return self.places.get((section, name), self.file)


def _flatten(document: ConfigTree, file: str) -> _Said:
    said = _Said(file, document.faults)
    for key, value in document.tree.items():
        place = document.places.get((key,), file)
        if key in section_classes():
            _say_section(said, key, value, place, document.places)
        else:
            said.say(TOP_LEVEL, key, value, place)
    return said


def _say_section(
    said: _Said, section: str, value: Any, place: str, places: dict[KeyPath, str]
) -> None:
    """Lay a section over what was said before. A bare string, or nothing at all, is a section
    too."""
    if isinstance(value, str) and section in FROM_STRING:
        value = _from_bare_string(section, value)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        said.faults.append(Fault(place, *_bad_section(section, value, place)))
        return
    for name, inner in value.items():
        said.say(section, name, inner, places.get((section, name), place))


def _from_bare_string(section: str, text: str) -> Any:
    return _data_from_string(text) if section == "data" else {FROM_STRING[section]: text}


def _data_from_string(text: str) -> Any:
    """A source's name, or a path whose suffix tells the source; anything else is left to become
    a fault."""
    if text in ("stdlib", "synthetic"):
        return {"source": text, "path": None}
    if text in _data_sources():
        return {"source": text}
    if source := source_of_file(text):
        return {"source": source, "path": text}
    if "/" in text or "." in text or (text and Path(text).exists()):
        return {"source": "text", "path": text}
    return text


def _data_sources() -> tuple[str, ...]:
    return get_args(field_types()["data"]["source"])


def _bad_section(section: str, value: Any, place: str) -> tuple[str, str]:
    def said(text: str) -> str:
        return f"{section}={text}" if place.startswith("override ") else f"`{section}: {text}`"

    if section == "data" and isinstance(value, str):
        sources, path = ", ".join(_data_sources()), f"./{value or 'notes'}.txt"
        return (
            f"data is {show_value(value)}, which is no source and looks like no path",
            f"write {said('stdlib')} (there are {sources}), or a path such as {said(path)}",
        )
    names = list(field_types()[section])
    first = default_setting(field_path(section, names[0])).partition("=")[2]
    example = f"{{{names[0]}: {first}}}"
    return (
        f"section `{section}` is {show_value(value)}, expected fields below it",
        f"write fields below it, such as {said(example)}; it takes {', '.join(names)}",
    )


# ---- overrides -------------------------------------------------------------------------------


def _join_flags(overrides: Sequence[str]) -> Iterator[str]:
    """`--optim.lr 3e-4` arrives as two words. They are joined so that the fix shows both."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        if word.startswith("-") and "=" not in word and words and "=" not in words[0]:
            word = f"{word} {words.pop(0)}"
        yield word


def _apply_override(said: _Said, text: str) -> None:
    place = f"override '{shorten(text)}'"
    path, value = _parse_override(text, place)
    section, *rest = path
    if section in section_classes() and not rest:
        _say_section(said, section, value, place, {})
    elif section in section_classes():
        name, *below = rest
        said.say(section, name, _put(said.values.get((section, name)), below, value), place)
    else:
        said.say(TOP_LEVEL, section, _put(None, rest, value), place)


def _parse_override(text: str, place: str) -> tuple[list[str], Any]:
    if text.startswith("-"):
        key, _, value = text.lstrip("-").replace(" ", "=", 1).partition("=")
        raise UserError(f"{place}: config fields are not flags", fix=_as_override(key, value))
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise UserError(
            f"{place}: expected section.field=value",
            fix=_as_override(".".join(filter(None, path)), value),
        )
    if len(path) > MAX_DEPTH:
        raise UserError(
            f"{place}: it names a setting {len(path)} levels deep",
            fix="write SECTION.FIELD=VALUE; `shardwise config schema` lists all",
        )
    document = read_yaml(value, lambda _: place)
    if document.faults:
        raise_faults(document.faults)
    return path, document.tree


def _as_override(key: str, value: str) -> str:
    """The spelling of the setting that a word means: `--lr` means `optim.lr`."""
    if not key:
        return f"write SECTION.FIELD={value or 'VALUE'}, such as optim.lr=3e-4"
    section, _, name = key.replace("-", "_").rpartition(".")
    owners = [section] if section else list(field_types())
    paths = [field_path(owner, name) for owner in owners if name in field_types().get(owner, ())]
    if paths:
        return "write " + ", or ".join(f"{path}={value or 'VALUE'}" for path in paths)
    return hint_for_key(section if section in field_types() else TOP_LEVEL, name)


def _put(before: Any, path: list[str], value: Any) -> Any:
    """A copy of the mapping `before` with `value` at `path`."""
    if not path:
        return value
    kept = before if isinstance(before, dict) else {}
    return {**kept, path[0]: _put(kept.get(path[0]), path[1:], value)}


# ---- judging ---------------------------------------------------------------------------------


def _checked_values(said: _Said) -> dict[tuple[str, str], Any]:
    """Every value as its field's type. All wrong ones are raised together."""
    checked, faults = {}, list(said.faults)
    for (section, name), value in said.values.items():
        place = said.places.get((section, name), said.file)
        if name not in field_types()[section]:
            faults.append(Fault(place, *_unknown_key(section, name)))
            continue
        try:
            checked[section, name] = _typed(field_types()[section][name], value)
        except ValueError:
            faults.append(Fault(place, *_wrong_type(section, name, value, place)))
    if faults:
        raise_faults(faults)
    return checked


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def _typed(hint: Any, value: Any) -> Any:
    """pydantic's strict JSON mode: 1 is a number, true is not, and a list may be a tuple.

    Its ValidationError is a ValueError, which is all that the caller needs to know.
    """
    return _adapter(hint).validate_json(json.dumps(value, default=str), strict=True)


def _unknown_key(section: str, key: str) -> tuple[str, str]:
    if section == TOP_LEVEL:
        return f"unknown section or key `{key}`", hint_for_key(section, key)
    return f"unknown key `{key}` in section `{section}`", hint_for_key(section, key)


def _wrong_type(section: str, name: str, value: Any, place: str) -> tuple[str, str]:
    path, hint = field_path(section, name), field_types()[section][name]
    what = f"{path} is {show_value(value)}, expected {words_for_type(hint)}"
    return what, _hint_for_value(path, hint, value, place)


def _hint_for_value(path: str, hint: Any, value: Any, place: str) -> str:
    members = get_args(hint) or (hint,)
    words = words_for_type(hint).replace(" or ", ", ").split(", ")
    is_override = place.startswith("override ")
    if str in members and not isinstance(value, str | dict | list | None):
        # What was written for any other value than a whole number is not known any more.
        text = str(value) if type(value) is int else "TEXT"
        typed = f"'{path}=\"{text}\"'" if is_override else f'`{path.split(".")[-1]}: "{text}"`'
        return f"put it in quotes, so that it stays the text that you wrote: {typed}"
    if isinstance(value, dict) and get_origin(hint) is dict:
        names = "NAME: 'TEXT'"
        return f"put each value that is none of these in quotes, such as {path}={{{names}}}"
    if isinstance(value, float) and value.is_integer() and int in members:
        return f"write {path}={int(value)}"
    if isinstance(value, str) and value.lower() in _SPOKEN_BOOLS and bool in members:
        return f"write {path}={_SPOKEN_BOOLS[value.lower()]}"
    if isinstance(value, str) and _reads_as(value, hint):
        return f"remove the quotes: {path}={value}"
    if isinstance(value, str) and (near := get_close_matches(value, words, n=1)):
        return f"did you mean {path}={near[0]}?"
    example = default_setting(path)
    return (
        f"write {words_for_type(hint)}, such as {example}; `shardwise config schema {path}` tells "
        "more"
    )


_SPOKEN_BOOLS = {"on": "true", "yes": "true", "off": "false", "no": "false"}


def _reads_as(text: str, hint: Any) -> bool:
    try:
        _typed(hint, read_yaml(text, str).tree)
    except (UserError, ValueError):
        return False
    return True
