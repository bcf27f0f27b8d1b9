"""Manifests with one fault each, which a schema has to refuse."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crd_schemas import Crd, Schema

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Mutant:
    """What was done to which place."""

    fault: str
    path: Place
    manifest: Mapping[str, Any]


def mutants(crd: Crd, manifest: Mapping[str, Any]) -> Iterator[Mutant]:
    """One for each way in which each value of the manifest can break its schema."""
    for path, schema, value in _values(crd.schema, manifest, ()):
        for fault, wrong in _broken(schema, value):
            # A file that is no object has no kind, and so no schema.
            if path or isinstance(wrong, dict):
                yield Mutant(fault, path, replaced(manifest, path, wrong))


def replaced(manifest: Mapping[str, Any], path: Place, value: Any) -> dict[str, Any]:
    """A copy with another value at one place."""
    whole: Any = [copy.deepcopy(dict(manifest))]
    holder, place = whole, 0
    for word in path:
        holder, place = holder[place], word
    holder[place] = value
    return dict(whole[0])


def _values(schema: Schema, value: Any, path: Place) -> Iterator[tuple[Place, Schema, Any]]:
    # The server reads the metadata of an object itself, whatever the schema says of it.
    if path == ("metadata",):
        return
    yield path, schema, value
    if isinstance(value, dict):
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if below is not None:
                yield from _values(below, inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _values(schema["items"], inner, (*path, index))


def _broken(schema: Schema, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield "type", "words"
        if not {"additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(schema):
            yield "unknown field", {**value, "unheardOf": 1}
        for name in schema.get("required", []):
            # A field that is not given has its default.
            if "default" not in schema["properties"][name]:
                yield "required", {key: one for key, one in value.items() if key != name}
    elif isinstance(value, list):
        yield "type", {"a": value}
        if schema.get("x-kubernetes-list-type") in ("map", "set") and value:
            yield "the same key", [*value, value[0]]
        if "maxItems" in schema:
            yield "maxItems", value * (1 + schema["maxItems"] // max(1, len(value)))
    else:
        yield "type", [value]
        yield from _broken_scalar(schema, value)


def _broken_scalar(schema: Schema, value: Any) -> Iterator[tuple[str, Any]]:
    if "enum" in schema:
        yield "enum", "Unheard"
    if "pattern" in schema:
        yield "pattern", "?!"
    if "maxLength" in schema:
        yield "maxLength", "x" * (schema["maxLength"] + 1)
    if schema.get("minLength"):
        yield "minLength", ""
    if "minimum" in schema:
        yield "minimum", schema["minimum"] - 1
    if schema.get("format") in ("int32", "int64"):
        yield "format", 2**63
