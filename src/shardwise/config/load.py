"""Text becomes a RunConfig here and nowhere else; whatever is wrong is said with its place.

A file is read into flat values, `(section, field) -> value`, each with the place it came from.
Overrides are laid over them, pydantic judges each value against the type of its field, and
rules.py judges them together. pydantic is imported only when there is something to judge.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml

from shardwise.config.reference import (
    TOP_LEVEL,
    field_path,
    field_types,
    hint_for_key,
    section_classes,
    show_value,
    words_for_type,
)
from shardwise.config.rules import Fault, raise_faults, validate_rules
from shardwise.config.schema import FROM_STRING, RunConfig
from shardwise.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PlaceOfLine = Callable[[int], str]
KeyPath = tuple[str, ...]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML, TOML or JSON file, lay `a.b=v` overrides over it, and check everything."""
    file = Path(path)
    said = _flatten(_read_file(file), str(file))
    for override in _join_flags(overrides):
        _apply_override(said, override)
    said.values.setdefault((TOP_LEVEL, "name"), file.stem)
    config = _assemble(_checked_values(said))
    validate_rules(config, said.place_of)
    return config


# ---- a config as plain data ------------------------------------------------------------------


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain mappings, lists and scalars, ready for json.dumps."""
    return _with_lists(asdict(config))


def config_from_dict(data: dict[str, Any]) -> RunConfig:
    """The inverse of config_to_dict. Workers call it on a saved plan, so it needs no pydantic."""
    values = {
        **{(TOP_LEVEL, name): data[name] for name in data if name not in section_classes()},
        **{
            (section, name): value
            for section in section_classes()
            for name, value in data.get(section, {}).items()
        },
    }
    if unknown := [key for key in values if key[1] not in field_types()[key[0]]]:
        raise UserError(
            f"the saved configuration has a field that does not exist: {field_path(*unknown[0])}",
            why="it was written by another version of shardwise",
            fix="make the plan again from its YAML file",
        )
    return _assemble({key: _with_tuple(key, value) for key, value in values.items()})


def dump_yaml(config: RunConfig) -> str:
    """Every field of a config as YAML that load_config reads back to an equal config."""
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    return [_with_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_tuple(key: tuple[str, str], value: Any) -> Any:
    section, name = key
    return tuple(value) if get_origin(field_types()[section][name]) is tuple else value


def _assemble(values: dict[tuple[str, str], Any]) -> RunConfig:
    by_section: dict[str, dict[str, Any]] = {section: {} for section in field_types()}
    for (section, name), value in values.items():
        by_section[section][name] = value
    sections = {name: cls(**by_section[name]) for name, cls in section_classes().items()}
    return RunConfig(**by_section[TOP_LEVEL], **sections)


# ---- files become trees with places ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Document:
    """A file's tree, the place of every key in it, and what was wrong with its keys."""

    tree: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def _read_file(file: Path) -> _Document:
    if not file.is_file():
        raise _missing_file(file)
    if file.suffix.lower() not in _READERS:
        raise UserError(
            f"{file}: cannot tell the format from the suffix `{file.suffix}`",
            fix=f"name it {file.stem or file.name}.yaml (or .toml, .json)",
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 text (byte {error.start})", fix="save it as UTF-8"
        ) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}", fix=f"ls -l {file}") from error
    document = _READERS[file.suffix.lower()](text, lambda line: f"{file}:{line}")
    if document.tree is None:
        return _Document({})
    if not isinstance(document.tree, dict):
        raise UserError(
            f"{file}: the top level is {show_value(document.tree)}, expected a mapping of sections",
            fix="write `section:` lines with fields below them, such as `model: tiny-llama`",
        )
    return document


def _missing_file(file: Path) -> UserError:
    if file.is_dir():
        return UserError(
            f"{file} is a directory", fix=f"name a file in it: {_near_files(file, '')}"
        )
    if not file.parent.is_dir():
        return UserError(f"{file}: there is no directory {file.parent}", fix="check the path")
    return UserError(f"{file}: no such file", fix=_near_files(file.parent, file.name))


def _near_files(directory: Path, name: str) -> str:
    files = sorted(f.name for f in directory.iterdir() if f.suffix.lower() in _READERS)
    near = get_close_matches(name, files, n=3, cutoff=0.4)
    if near:
        return f"did you mean {' or '.join(str(directory / n) for n in near)}?"
    if files:
        return f"{directory} has {', '.join(files[:8])}"
    return "start from an example: shardwise config ls"


def _read_json(text: str, place_of: PlaceOfLine) -> _Document:
    """json judges the syntax; the YAML reader, which knows lines, then reads the same text."""
    if text.strip():
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise _syntax_error("JSON", place_of(error.lineno), error.msg) from error
    return _read_yaml(text.replace("\t", " "), place_of)


def _read_toml(text: str, place_of: PlaceOfLine) -> _Document:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = int(line[1]) if line else text.count("\n") + 1
        raise _syntax_error("TOML", place_of(number), str(error)) from error
    return _Document(tree, _toml_places(text, place_of))


def _toml_places(text: str, place_of: PlaceOfLine) -> dict[KeyPath, str]:
    """tomllib tells no lines, so `[section]` and `key =` lines are looked up in the text."""
    places: dict[KeyPath, str] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _toml_key(header[1])
            places.setdefault(table, place_of(number))
        elif key := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            places.setdefault((*table, *_toml_key(key[1])), place_of(number))
    return places


def _toml_key(text: str) -> KeyPath:
    return tuple(part.strip(" \"'") for part in text.split("."))


def _syntax_error(language: str, place: str, problem: str) -> UserError:
    return UserError(
        f"{place}: not valid {language}: {problem}",
        fix="check indentation (spaces, no tabs), quotes and brackets here and on the line above",
    )


# ---- YAML, without its traps -----------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: `3e-4` is a number, `on` and `12:30` are text."""


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that _Loader would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+",
        lambda text: int(text, 0 if text[:2] in ("0x", "0o") else 10),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
    ),
    "str": (r"(?!)", str),  # no pattern: text is whatever the others leave
}
_TAG = "tag:yaml.org,2002:"


def _read_scalars_with(yaml_class: type[_Loader] | type[_Dumper]) -> None:
    yaml_class.yaml_implicit_resolvers = {}
    for name, (pattern, _) in _SCALARS.items():
        yaml_class.add_implicit_resolver(_TAG + name, re.compile(f"^(?:{pattern})$"), None)


_read_scalars_with(_Loader)
_read_scalars_with(_Dumper)


def _read_yaml(text: str, place_of: PlaceOfLine) -> _Document:
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = place_of(mark.line + 1 if mark else 1)
        raise _syntax_error("YAML", place, error.problem or str(error)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise _syntax_error("YAML", place_of(line), error.reason) from error
    if root is None:
        return _Document(None)
    walk = _YamlWalk(place_of)
    return _Document(walk.value(root, ()), walk.places, walk.faults)


class _YamlWalk:
    """Nodes become values; places of keys and keys that stand twice are noted on the way."""

    def __init__(self, place_of: PlaceOfLine) -> None:
        self.place_of = place_of
        self.places: dict[KeyPath, str] = {}
        self.faults: list[Fault] = []

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if len(path) > 50:
            raise _syntax_error("YAML", self._place(node), "nested too deeply, or into itself")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, "")) for item in node.value]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _syntax_error("YAML", self._place(key_node), "a key must be a plain word")
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in values:
                name = ".".join((*path, key))
                what = f"`{name}` is given twice, on line {lines[key]} and on line {line}"
                self.faults.append(Fault(self.place_of(line), what, "keep one of them"))
                continue
            lines[key] = line
            self.places[(*path, key)] = self.place_of(line)
            values[key] = self.value(value_node, (*path, key))
        return values

    def _scalar(self, node: yaml.Node) -> Any:
        _, convert = _SCALARS.get(node.tag.removeprefix(_TAG), ("", None))
        if convert is None:
            raise _syntax_error("YAML", self._place(node), f"the tag {node.tag} is not taken")
        try:
            return convert(node.value)
        except ValueError as error:
            raise _syntax_error("YAML", self._place(node), str(error)) from error

    def _place(self, node: yaml.Node) -> str:
        return self.place_of(node.start_mark.line + 1)


_READERS = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}


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


def _flatten(document: _Document, file: str) -> _Said:
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
    """Lay a section over what was said before; a bare string or nothing at all is a section too."""
    if isinstance(value, str) and section in FROM_STRING:
        value = _from_bare_string(section, value)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        said.faults.append(Fault(place, *_bad_section(section, value)))
        return
    for name, inner in value.items():
        said.say(section, name, inner, places.get((section, name), place))


def _from_bare_string(section: str, text: str) -> Any:
    return _data_from_string(text) if section == "data" else {FROM_STRING[section]: text}


def _data_from_string(text: str) -> Any:
    """A source's name, or a path that tells its source; anything else is left for the fault."""
    if text in ("stdlib", "synthetic"):
        return {"source": text, "path": None}
    if text in _data_sources():
        return {"source": text}
    if text.endswith((".jsonl", ".json")):
        return {"source": "jsonl", "path": text}
    if "/" in text or "." in text or (text and Path(text).exists()):
        return {"source": "text", "path": text}
    return text


def _data_sources() -> tuple[str, ...]:
    return get_args(field_types()["data"]["source"])


def _bad_section(section: str, value: Any) -> tuple[str, str]:
    if section == "data" and isinstance(value, str):
        sources = ", ".join(_data_sources())
        return (
            f"data is {show_value(value)}, which is no source and looks like no path",
            f"write one of {sources}, or a path such as ./{value or 'notes'}.txt",
        )
    names = ", ".join(field_types()[section])
    return (
        f"section `{section}` is {show_value(value)}, expected fields below it",
        f"write `{section}:` with any of {names} indented below it",
    )


# ---- overrides -------------------------------------------------------------------------------


def _join_flags(overrides: Sequence[str]) -> Iterator[str]:
    """`--optim.lr 3e-4` arrives as two words; they are put together so that the fix shows both."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        if word.startswith("-") and "=" not in word and words and "=" not in words[0]:
            word = f"{word} {words.pop(0)}"
        yield word


def _apply_override(said: _Said, text: str) -> None:
    place = f"override '{text}'"
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
        raise UserError(
            f"{place}: config fields are not flags", fix=f"write {key}={value or 'VALUE'}"
        )
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise UserError(
            f"{place}: expected section.field=value",
            fix=f"write {'.'.join(filter(None, path)) or 'optim.lr'}={value or 'VALUE'}",
        )
    document = _read_yaml(value, lambda _: place)
    if document.faults:
        raise_faults(document.faults)
    return path, document.tree


def _put(before: Any, path: list[str], value: Any) -> Any:
    """`value` at `path` inside a copy of the mapping `before`; nothing else in it changes."""
    if not path:
        return value
    kept = before if isinstance(before, dict) else {}
    return {**kept, path[0]: _put(kept.get(path[0]), path[1:], value)}


# ---- judging ---------------------------------------------------------------------------------


def _checked_values(said: _Said) -> dict[tuple[str, str], Any]:
    """Every value as its field's type; all that are wrong are raised together."""
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
        return f"{_QUOTE}, inside the shell's own: '{path}=\"...\"'" if is_override else _QUOTE
    if isinstance(value, float) and value.is_integer() and int in members:
        return f"write {int(value)}"
    if isinstance(value, str) and value.lower() in _SPOKEN_BOOLS and bool in members:
        return f"write {_SPOKEN_BOOLS[value.lower()]}"
    if isinstance(value, str) and _reads_as(value, hint):
        return "remove the quotes"
    if isinstance(value, str) and (near := get_close_matches(value, words, n=1)):
        return f"did you mean {near[0]}?"
    return f"write {words_for_type(hint)}; `shardwise config schema {path}` tells more"


_QUOTE = "put it in quotes, so that it stays the text that you wrote"
_SPOKEN_BOOLS = {"on": "true", "yes": "true", "off": "false", "no": "false"}


def _reads_as(text: str, hint: Any) -> bool:
    try:
        _typed(hint, _read_yaml(text, str).tree)
    except (UserError, ValueError):
        return False
    return True
