"""The reader of CRDs refuses what an API server refuses, keyword by keyword."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from crd_mutants import mutants
from crd_schemas import Crd, read_crds, rules_of, schema_faults

WORDS = {"type": "array", "items": {"type": "string"}}
SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4},
        "count": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9},
        "share": {"type": "number"},
        "since": {"type": "string", "format": "date-time"},
        "mode": {"type": "string", "enum": ["hard", "soft"], "default": "soft"},
        "size": {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": "^[0-9]+Mi$",
            "x-kubernetes-int-or-string": True,
        },
        "items": {
            "type": "array",
            "maxItems": 3,
            "minItems": 1,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name", "port"],
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "port": {"type": "integer", "default": 1},
                },
                "required": ["name", "port"],
            },
        },
        "set": {**WORDS, "x-kubernetes-list-type": "set"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "none": {"type": "string", "nullable": True},
    },
    "x-kubernetes-validations": [
        {"rule": "self == oldSelf", "message": "immutable"},
        {"rule": "self.mode == 'soft'", "message": "must be soft"},
    ],
}
CRD = Crd("Thing", "things.example.com/v1", {"type": "object", "properties": {"spec": SPEC}})
GOOD: dict[str, Any] = {
    "name": "abc",
    "count": 3,
    "share": 1,
    "since": "2026-11-18T12:00:00Z",
    "size": "8Mi",
    "items": [{"name": "a"}, {"name": "a", "port": 2}],
    "set": ["a", "b"],
    "labels": {"any": "word"},
    "open": {"any": [1]},
    "none": None,
}


def thing(**changes: Any) -> dict[str, Any]:
    head = {"apiVersion": "things.example.com/v1", "kind": "Thing", "metadata": {"name": "a"}}
    return {**head, "spec": {**GOOD, **changes}}


@pytest.fixture(scope="module")
def crd(tmp_path_factory: pytest.TempPathFactory) -> Crd:
    """Read back from a file, as `make crds` downloads it."""
    folder = tmp_path_factory.mktemp("crds")
    known = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "spec": SPEC}
    schema = {"openAPIV3Schema": {"type": "object", "properties": known}}
    versions = [
        {"name": "v1", "served": True, "schema": schema},
        {"name": "v0", "served": False, "schema": {}},
    ]
    spec = {"group": "things.example.com", "names": {"kind": "Thing"}, "versions": versions}
    (folder / "below").mkdir()
    text = yaml.safe_dump({"kind": "CustomResourceDefinition", "spec": spec})
    (folder / "below" / "things.yaml").write_text(f"---\n{text}")
    (folder / "others.yaml").write_text("resources: [below/things.yaml]\n")
    found = read_crds(folder)
    assert list(found) == [("things.example.com/v1", "Thing")]
    return found["things.example.com/v1", "Thing"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"size": 8, "share": 0.5, "mode": "hard"}, None),
        ({"unheard": 1}, "$.spec.unheard: unknown field"),
        ({"name": "a"}, "minLength is 2"),
        ({"name": "abcde"}, "maxLength is 4"),
        ({"name": "a1"}, "does not match"),
        ({"name": None}, "must not be null"),
        ({"count": 0}, "minimum is 1"),
        ({"count": 10}, "maximum is 9"),
        ({"count": 2**31}, "is no int32"),
        ({"count": True}, "wrong type"),
        ({"count": "3"}, "wrong type"),
        ({"since": "today"}, "is no time"),
        ({"mode": "firm"}, "is none of"),
        ({"size": "8"}, "does not match"),
        ({"size": 1.5}, "wrong type"),
        ({"items": []}, "minItems is 1"),
        ({"items": [{"name": str(index)} for index in range(4)]}, "maxItems is 3"),
        ({"items": [{"name": "a"}, {"name": "a", "port": 1}]}, "the same key"),
        ({"items": [{"port": 1}]}, "$.spec.items[0].name: is required"),
        ({"set": ["a", "a"]}, "the same key"),
        ({"labels": {"a": 1}}, "$.spec.labels.a: 1 is of the wrong type"),
    ],
)
def test_a_keyword_refuses(crd: Crd, changes: dict[str, Any], said: str | None) -> None:
    faults = schema_faults(crd, thing(**changes))
    assert (faults == []) if said is None else any(said in one for one in faults)


def test_an_object_has_a_name_and_no_other_fields(crd: Crd) -> None:
    good = thing()
    assert schema_faults(crd, {**good, "metadata": {"name": "a", "labels": {"a": "b"}}}) == []
    assert schema_faults(crd, {**good, "metadata": {}}) == ["$.metadata.name: is required"]
    assert schema_faults(crd, {**good, "status": {}}) == ["$.status: unknown field"]
    assert schema_faults(crd, {"kind": "Thing", "metadata": {"name": "a"}})


def test_rules_see_defaults_and_only_those_about_a_new_object(crd: Crd) -> None:
    (rule,) = rules_of(crd, thing())
    assert (rule.place, rule.message) == ("$.spec", "must be soft")
    assert rule.value["mode"] == "soft" and rule.value["items"][0] == {"name": "a", "port": 1}


def test_a_keyword_that_is_not_read_is_an_error(crd: Crd) -> None:
    odd = {**SPEC, "oneOf": [{}]}
    with pytest.raises(NotImplementedError, match="oneOf"):
        schema_faults(Crd("Thing", "v1", {"properties": {"spec": odd}}), thing())


def test_every_mutant_is_refused(crd: Crd) -> None:
    good = thing(mode="hard")
    del good["spec"]["none"]
    made = list(mutants(crd, good))
    assert all(schema_faults(crd, one.manifest) for one in made)
    wanted = {"type", "unknown field", "required", "the same key", "enum", "pattern", "format"}
    assert wanted <= {one.fault for one in made}
    assert schema_faults(crd, good) == []
