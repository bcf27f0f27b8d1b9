"""The schema as data and as text: the fields, in words for users.

Everything here is read from the schema, so the documentation, the JSON schema and the error
messages cannot disagree with the loader.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, reduce
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.config import schema

TOP_LEVEL = ""
# Characters of a value that an error shows.
_SHOWN = 200

_WORDS = {int: "a whole number", float: "a number", str: "text", NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDoc:
    """One row of the reference. `section` is empty for the fields of the file's top level."""

    section: str
    name: str
    type: str
    default: str
    doc: str

    @property
    def path(self) -> str:
        """The name that an override uses, such as `optim.lr`."""
        return field_path(self.section, self.name)


def field_path(section: str, name: str) -> str:
    """('optim', 'lr') -> 'optim.lr'; fields of the top level stand alone."""
    return f"{section}.{name}" if section else name


def value_at(config: schema.RunConfig, path: str) -> Any:
    """The value of a field by its path, such as `optim.lr`."""
    return reduce(getattr, path.split("."), config)


def show_value(value: object) -> str:
    """A value as a config file spells it: true, null, "text", 0.5. A long one is cut."""
    return shorten(json.dumps(value, default=str, ensure_ascii=False))


def shorten(text: str) -> str:
    """The start of a text that would fill the screen."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


@cache
def section_classes() -> dict[str, type]:
    """The dataclass behind every section, in the order of the file."""
    hints = get_type_hints(schema.RunConfig)
    return {name: cls for name, cls in hints.items() if isinstance(cls, type) and is_dataclass(cls)}


@cache
def field_types() -> dict[str, dict[str, Any]]:
    """The type of every field, by section; the top level comes first, without the sections."""
    top = get_type_hints(schema.RunConfig)
    plain = {name: hint for name, hint in top.items() if name not in section_classes()}
    return {
        TOP_LEVEL: plain,
        **{section: get_type_hints(cls) for section, cls in section_classes().items()},
    }


def words_for_type(hint: Any) -> str:
    """`int | Literal['auto']` -> 'a whole number or auto': the types in a reader's words."""
    *most, last = _alternatives(hint)
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(hint: Any) -> list[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [str(name) for name in arguments]
    if origin is list:
        return [f"a list of {_PLURALS[arguments[0]]}"]
    if origin is tuple:
        return [f"a list of {len(arguments)} {_PLURALS[arguments[0]]}"]
    if origin is dict:
        if get_origin(arguments[1]) is dict:
            return ["a mapping of names to mappings"]
        kinds = get_args(arguments[1]) or (arguments[1],)
        values = [_PLURALS[kind] for kind in kinds if kind in _PLURALS]
        return [f"a mapping of names to {' or '.join(values)}" if values else "a mapping"]
    if hint is bool:
        return ["true", "false"]
    if arguments:
        return [words for member in arguments for words in _alternatives(member)]
    return [_WORDS[hint]]


def default_setting(path: str) -> str:
    """A field with its default as an override spells it: `optim.betas=[0.9,0.95]`."""
    default = next(field.default for field in describe_fields() if field.path == path)
    return f"{path}={default.replace(', ', ',')}"


def hint_for_key(section: str, key: str) -> str:
    """Where a key that `section` does not have may belong: its nearest name, and the sections
    that have it."""
    owners = [_name_owner(owner, key) for owner in field_types() if key in names_in(owner)]
    near = [f"did you mean `{name}`?" for name in get_close_matches(key, names_in(section), n=1)]
    return _hint_for_path(key) or "; ".join(owners + near) or _hint_from_afar(section, key)


def names_in(section: str) -> list[str]:
    """What may stand in a section; at the top level that includes the sections."""
    names = list(field_types()[section])
    return names if section else [*names, *section_classes()]


def _name_owner(owner: str, key: str) -> str:
    if owner == TOP_LEVEL:
        return f"`{key}` belongs to the top level of the file"
    return f"`{key}` belongs to section `{owner}`: write {owner}.{key}"


def _hint_for_path(key: str) -> str:
    section, _, name = key.rpartition(".")
    is_field = section and name in field_types().get(section, {})
    return f"in a file, write `{name}:` indented below `{section}:`" if is_field else ""


def _hint_from_afar(section: str, key: str) -> str:
    by_name = {field.name: field.path for field in reversed(describe_fields())}
    if near := get_close_matches(key, by_name, n=1, cutoff=0.75):
        return f"did you mean {by_name[near[0]]}?"
    taker = f"section `{section}`" if section else "a file"
    return f"{taker} takes {', '.join(names_in(section))}"


@cache
def describe_fields() -> list[FieldDoc]:
    """Every field that a user may set, with its type, default and docstring."""
    classes = {TOP_LEVEL: schema.RunConfig, **section_classes()}
    return [
        FieldDoc(
            section=section,
            name=field.name,
            type=words_for_type(field_types()[section][field.name]),
            default=_spell_default(field),
            doc=_field_docstrings()[cls.__name__].get(field.name, ""),
        )
        for section, cls in classes.items()
        for field in fields(cls)
        if field.name in field_types()[section]
    ]


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _spell_default(field: Field[Any]) -> str:
    default = _default_of(field)
    return default if isinstance(default, str) else show_value(default)


@cache
def _field_docstrings() -> dict[str, dict[str, str]]:
    """Docstrings of fields. Python keeps none, so they are read from the source text."""
    classes = (schema.RunConfig, *section_classes().values())
    return {cls.__name__: _docstrings_in(cls) for cls in classes}


def _docstrings_in(cls: type) -> dict[str, str]:
    (node,) = ast.parse(inspect.getsource(cls)).body
    statements = node.body if isinstance(node, ast.ClassDef) else []
    found = {}
    for statement, below in pairwise(statements):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def json_schema() -> dict[str, Any]:
    """A JSON Schema that editors understand; as strict about keys as the loader."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardwise run",
        "description": inspect.getdoc(schema.RunConfig),
        "type": "object",
        "properties": {
            **_field_schemas(TOP_LEVEL, schema.RunConfig),
            **{name: _section_schema(name, cls) for name, cls in section_classes().items()},
        },
        "additionalProperties": False,
    }


def _section_schema(section: str, cls: type) -> dict[str, Any]:
    takes_bare_string = ["string"] if section in schema.FROM_STRING else []
    return {
        "description": inspect.getdoc(cls),
        "type": ["object", "null", *takes_bare_string],
        "properties": _field_schemas(section, cls),
        "additionalProperties": False,
    }


def _field_schemas(section: str, cls: type) -> dict[str, Any]:
    from pydantic import TypeAdapter

    defaults = {field.name: _default_of(field) for field in fields(cls)}
    return {
        doc.name: {
            **TypeAdapter(field_types()[section][doc.name]).json_schema(),
            "description": doc.doc,
            "default": json.loads(show_value(defaults[doc.name])),
        }
        for doc in describe_fields()
        if doc.section == section
    }


def markdown_reference() -> str:
    """The tables of docs/configuration.md, one per section."""
    top = _markdown_section("Top level", "Fields outside any section.", TOP_LEVEL)
    rest = [
        _markdown_section(f"`{section}`", inspect.getdoc(cls) or "", section)
        for section, cls in section_classes().items()
    ]
    return "\n".join([top, *rest])


def _markdown_section(title: str, doc: str, section: str) -> str:
    rows = [_markdown_row(field) for field in describe_fields() if field.section == section]
    head = ["| field | takes | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"### {title}", "", doc, "", *head, *rows, ""])


def _markdown_row(field: FieldDoc) -> str:
    cells = (f"`{field.path}`", field.type, f"`{field.default}`", field.doc)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
