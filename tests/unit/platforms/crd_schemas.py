"""Objects against the `openAPIV3Schema` of a CustomResourceDefinition, as an API server reads it
with strict field validation.

A keyword that is not read here is an error, so that no rule of a schema is passed over.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Schema = Mapping[str, Any]
_RULES = "x-kubernetes-validations"
_RANGES = {"int32": 2**31, "int64": 2**63}
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
_READ = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "pattern"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minimum", "maximum", "format", "anyOf", "default", "nullable", _RULES),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    # Words for people, and how two writers of one map are merged.
    *("description", "title", "x-kubernetes-map-type"),
}


@dataclass(frozen=True)
class Crd:
    """One served version of a kind."""

    kind: str
    api_version: str
    schema: Schema


@dataclass(frozen=True)
class Ruled:
    """A CEL rule, and the value that it is about."""

    place: str
    rule: str
    message: str
    value: Any


def read_crds(folder: Path) -> dict[tuple[str, str], Crd]:
    """By version and kind: every definition in the YAML files of a folder and of those below it."""
    found = {}
    for path in sorted(folder.rglob("*.yaml")):
        for one in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            if not isinstance(one, dict) or one.get("kind") != "CustomResourceDefinition":
                continue
            spec = one["spec"]
            for version in spec["versions"]:
                if version["served"]:
                    api, kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[api, kind] = Crd(kind, api, version["schema"]["openAPIV3Schema"])
    return found


def with_defaults(schema: Schema, value: Any) -> Any:
    """A copy in which fields that are not given have the schema's defaults."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        made = {
            name: with_defaults(known.get(name, schema.get("additionalProperties", {})), inner)
            for name, inner in value.items()
        }
        for name, one in known.items():
            if "default" in one and name not in made:
                made[name] = with_defaults(one, copy.deepcopy(one["default"]))
        return made
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), one) for one in value]
    return value


def schema_faults(crd: Crd, manifest: Mapping[str, Any]) -> list[str]:
    """What the schema refuses. The server itself reads an object's own metadata."""
    return list(_faults(_inner(crd), with_defaults(_inner(crd), dict(manifest)), "$"))


def rules_of(crd: Crd, manifest: Mapping[str, Any]) -> list[Ruled]:
    """The CEL rules of all values that the manifest has."""
    return list(_rules(_inner(crd), with_defaults(_inner(crd), dict(manifest)), "$"))


def _inner(crd: Crd) -> Schema:
    """A schema says of an object's own metadata only that it is an object."""
    known = {**crd.schema["properties"], "metadata": _METADATA}
    return {**crd.schema, "properties": known, "required": ["apiVersion", "kind", "metadata"]}


_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _WORDS,
        "annotations": _WORDS,
    },
    "required": ["name"],
}


def _faults(schema: Schema, value: Any, place: str) -> Iterator[str]:
    if unread := set(schema) - _READ:
        raise NotImplementedError(f"{place}: the schema's {sorted(unread)} is not read")
    if value is None:
        if not schema.get("nullable"):
            yield f"{place}: must not be null"
        return
    if schema.get("x-kubernetes-int-or-string"):
        right = _TYPES["integer"](value) or _TYPES["string"](value)
    else:
        right = _TYPES[schema["type"]](value) if "type" in schema else True
    if not right:
        yield f"{place}: {value!r} is of the wrong type"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    yield from _of_kind(schema, value, place)
    for name, compared in (("minimum", value), ("maximum", value)):
        if name in schema and not _within(name, schema[name], compared):
            yield f"{place}: {name} is {schema[name]}, the value {value}"


def _of_kind(schema: Schema, value: Any, place: str) -> Iterator[str]:
    sizes = {dict: "Properties", list: "Items", str: "Length"}
    if type(value) in sizes:
        for end in ("min", "max"):
            limit = schema.get(end + sizes[type(value)])
            if limit is not None and not _within(end, limit, len(value)):
                yield f"{place}: {end}{sizes[type(value)]} is {limit}, this has {len(value)}"
    if isinstance(value, dict):
        yield from _object_faults(schema, value, place)
    elif isinstance(value, list):
        yield from _list_faults(schema, value, place)
    elif isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{place}: {value!r} does not match {schema['pattern']}"
        if schema.get("format") == "date-time" and not re.fullmatch(_TIME, value):
            yield f"{place}: {value!r} is no time"
    elif schema.get("format") in _RANGES:
        limit = _RANGES[schema["format"]]
        if not -limit <= value < limit:
            yield f"{place}: {value} is no {schema['format']}"


def _within(end: str, limit: float, value: float) -> bool:
    return value >= limit if end.startswith("min") else value <= limit


def _object_faults(schema: Schema, value: Mapping[str, Any], place: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{place}.{name}: is required"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, inner in value.items():
        if name in known:
            yield from _faults(known[name], inner, f"{place}.{name}")
        elif isinstance(others, dict):
            yield from _faults(others, inner, f"{place}.{name}")
        elif not (others or schema.get("x-kubernetes-preserve-unknown-fields")):
            yield f"{place}.{name}: unknown field"


def _list_faults(schema: Schema, value: list[Any], place: str) -> Iterator[str]:
    for index, item in enumerate(value):
        yield from _faults(schema["items"], item, f"{place}[{index}]")
    kind = schema.get("x-kubernetes-list-type")
    if kind == "map":
        names = schema["x-kubernetes-list-map-keys"]
        keys = [[one.get(name) for name in names] for one in value if isinstance(one, dict)]
    else:
        keys = list(value) if kind == "set" else []
    if any(key in keys[:index] for index, key in enumerate(keys)):
        yield f"{place}: two items with the same key"


def _rules(schema: Schema, value: Any, place: str) -> Iterator[Ruled]:
    for one in schema.get(_RULES, []):
        # A rule about a change has no meaning where an object is made.
        if "oldSelf" not in one["rule"]:
            yield Ruled(place, one["rule"], one.get("message", one["rule"]), value)
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name, others)
            if isinstance(below, dict):
                yield from _rules(below, inner, f"{place}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _rules(schema["items"], item, f"{place}[{index}]")
