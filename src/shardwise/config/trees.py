"""Files as trees, in which every key knows the line that it came from."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from shardwise.config.rule import Fault
from shardwise.config.schema_text import shorten, show_value
from shardwise.errors import UserError
from shardwise.files import free_name, parse_json, read_bytes, why_no_path

# A configuration has a few kilobytes, a few hundred values, and four levels. The limits are a
# second's work for the slowest reader.
_MAX_BYTES = 2**18
_MAX_VALUES = 10_000
MAX_DEPTH = 50
# The parts of a TOML key: its reader takes the square of their number.
_DEEP_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}"""
)

PlaceOfLine = Callable[[int], str]
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigTree:
    """A file's tree, the place of every key in it, and what was wrong with its keys."""

    tree: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def read_file(file: Path) -> ConfigTree:
    """The tree of a YAML, TOML or JSON file, by its suffix."""
    if (why := why_no_path(str(file))) is not None:
        raise UserError(f"{shorten(str(file))}: no such file: {why}", fix=start_from_example())
    if not file.is_file():
        raise _missing_file(file)
    if file.suffix.lower() not in _READERS:
        raise UserError(
            f"{file}: cannot tell the format from the suffix `{file.suffix}`",
            fix=f"name it .yaml (or .toml, .json): mv {quote(str(file))} "
            f"{quote(str(file.with_name(f'{file.stem or file.name}.yaml')))}",
        )
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UserError(
                f"{file}: {file.stat().st_size} bytes are too many for a configuration",
                fix=start_from_example(),
            )
        text = read_bytes(file, _MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 text (byte {error.start})", fix="save it as UTF-8"
        ) from error
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}",
            fix=f"see who may read it: ls -l {quote(str(file))}",
        ) from error
    document = _READERS[file.suffix.lower()](text, lambda line: f"{file}:{line}")
    if document.tree is None:
        return ConfigTree({})
    if not isinstance(document.tree, dict):
        raise UserError(
            f"{file}: the top level is {show_value(document.tree)}, expected a mapping of sections",
            fix="write `section:` lines with fields below them, such as `model: tiny-llama`",
        )
    return document


def start_from_example() -> str:
    """The command that creates a file to start from. It never names a file that exists."""
    name = Path("run.yaml")
    new = free_name(name) if name.exists() else name
    return f"start from an example: shardwise config cp demo {new}"


def _missing_file(file: Path) -> UserError:
    if file.exists() and not file.is_dir():
        return UserError(f"{file} is no plain file", fix=start_from_example())
    if file.is_dir():
        return UserError(
            f"{file} is a directory", fix=f"name a file instead: {_near_files(file, '')}"
        )
    if not file.parent.is_dir():
        return UserError(f"{file}: there is no directory {file.parent}", fix=start_from_example())
    return UserError(f"{file}: no such file", fix=_near_files(file.parent, file.name))


def _near_files(directory: Path, name: str) -> str:
    try:
        files = sorted(f.name for f in directory.iterdir() if f.suffix.lower() in _READERS)
    except OSError as error:
        return f"check {directory}: {error.strerror}"
    near = get_close_matches(name, files, n=3, cutoff=0.4)
    if near:
        return f"did you mean {' or '.join(str(directory / n) for n in near)}?"
    if files:
        return f"there are {', '.join(str(directory / name) for name in files[:8])}"
    return start_from_example()


def _read_json(text: str, place_of: PlaceOfLine) -> ConfigTree:
    """json checks the syntax. The YAML reader, which knows lines, then reads the same text."""
    if text.strip():
        try:
            parse_json(text)
        except json.JSONDecodeError as error:
            raise _syntax_error("JSON", place_of(error.lineno), error.msg) from error
        except ValueError as error:
            raise _syntax_error("JSON", place_of(1), str(error)) from error
    return read_yaml(text.replace("\t", " "), place_of)


def _read_toml(text: str, place_of: PlaceOfLine) -> ConfigTree:
    if deep := _DEEP_KEY.search(text):
        place = place_of(text.count("\n", 0, deep.start()) + 1)
        raise _syntax_error("TOML", place, "nested too deeply")
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = int(line[1]) if line else text.count("\n") + 1
        raise _syntax_error("TOML", place_of(number), str(error)) from error
    except RecursionError as error:
        raise _syntax_error("TOML", place_of(1), "nested too deeply") from error
    except ValueError as error:  # Python converts no number of thousands of digits
        raise _syntax_error("TOML", place_of(1), _TOO_LARGE) from error
    _validate_tree(tree, place_of)
    return ConfigTree(tree, _toml_places(text, place_of))


def _validate_tree(tree: Any, place_of: PlaceOfLine) -> None:
    """Apply the limits of the YAML walk to a tree without nodes."""
    waiting, num_values = [(tree, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_values += len(value)
        if depth > MAX_DEPTH:
            raise _syntax_error("TOML", place_of(1), "nested too deeply")
        if num_values > _MAX_VALUES:
            raise _syntax_error("TOML", place_of(1), _TOO_MANY)
        for inner in value.values() if isinstance(value, dict) else value:
            if _is_too_large(inner):
                raise _syntax_error("TOML", place_of(1), _TOO_LARGE)
            if isinstance(inner, dict | list):
                waiting.append((inner, depth + 1))


def _toml_places(text: str, place_of: PlaceOfLine) -> dict[KeyPath, str]:
    """tomllib gives no line numbers, so `[section]` and `key =` lines are searched in the text."""
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


# Far more characters than 64 bits take in any spelling.
_LONGEST_NUMBER = 100
_TOO_LARGE = "a number has more than 64 bits"
_TOO_MANY = f"more than {_MAX_VALUES} values"


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


class YamlLoader(yaml.SafeLoader):
    """YAML 1.2's scalars: `3e-4` is a number, `on` and `12:30` are text.

    Reading ends where a value is too deep or too much: reading all of it could take minutes.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One value with all that is in it."""
        self._num_nodes += 1
        self._depth += 1
        problem = "nested too deeply" if self._depth > MAX_DEPTH else _TOO_MANY
        if self._depth > MAX_DEPTH or self._num_nodes > 2 * _MAX_VALUES:  # keys are nodes too
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(problem=problem, problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class YamlDumper(yaml.SafeDumper):
    """Quotes exactly the text that YamlLoader would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        """Repeat values instead of pointing at them, because people read this file."""
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


def _read_scalars_with(yaml_class: type[YamlLoader] | type[YamlDumper]) -> None:
    yaml_class.yaml_implicit_resolvers = {}
    for name, (pattern, _) in _SCALARS.items():
        yaml_class.add_implicit_resolver(_TAG + name, re.compile(f"^(?:{pattern})$"), None)


_read_scalars_with(YamlLoader)
_read_scalars_with(YamlDumper)


def read_yaml(text: str, place_of: PlaceOfLine) -> ConfigTree:
    """The tree of YAML text. A duplicate key is a fault."""
    try:
        root = yaml.compose(text, Loader=YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = place_of(mark.line + 1 if mark else 1)
        raise _syntax_error("YAML", place, error.problem or str(error)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise _syntax_error("YAML", place_of(line), error.reason) from error
    except RecursionError as error:
        raise _syntax_error("YAML", place_of(1), "nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape such as "\U99999999"
        raise _syntax_error("YAML", place_of(1), str(error)) from error
    if root is None:
        return ConfigTree(None)
    walk = _YamlWalk(place_of)
    return ConfigTree(walk.value(root, ()), walk.places, walk.faults)


class _YamlWalk:
    """Turns nodes into values, and notes places of keys and duplicate keys."""

    def __init__(self, place_of: PlaceOfLine) -> None:
        self.place_of = place_of
        self.places: dict[KeyPath, str] = {}
        self.faults: list[Fault] = []
        self.num_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise _syntax_error("YAML", self._place(node), "nested too deeply, or into itself")
        # Aliases of aliases can make a short file arbitrarily large.
        self.num_values += 1
        if self.num_values > _MAX_VALUES:
            raise _syntax_error("YAML", self._place(node), _TOO_MANY)
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
            raise _syntax_error("YAML", self._place(node), f"the tag {node.tag} is not allowed")
        try:
            value = convert(node.value)
        except ValueError as error:
            # Python's message for a number of thousands of digits is for programmers.
            is_long = len(node.value) > _LONGEST_NUMBER
            problem = _TOO_LARGE if is_long else str(error)
            raise _syntax_error("YAML", self._place(node), problem) from error
        if _is_too_large(value):
            raise _syntax_error("YAML", self._place(node), _TOO_LARGE)
        return value

    def _place(self, node: yaml.Node) -> str:
        return self.place_of(node.start_mark.line + 1)


_READERS = {".yaml": read_yaml, ".yml": read_yaml, ".toml": _read_toml, ".json": _read_json}
