from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from shardwise.config.schema_text import (
    describe_fields,
    json_schema,
    markdown_reference,
    section_classes,
    words_for_type,
)

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | Literal["auto"], "a whole number or auto"),
        (bool | int | Literal["auto"], "true, false, a whole number or auto"),
        (str | list[str] | None, "text, a list of texts or null"),
        (tuple[float, float], "a list of 2 numbers"),
        (dict[str, Any], "a mapping"),
        (dict[str, int | str], "a mapping of names to whole numbers or texts"),
        (Literal["a", "b"] | float, "a, b or a number"),
    ],
)
def test_types_are_told_in_words(hint: Any, words: str) -> None:
    assert words_for_type(hint) == words


def test_every_field_has_a_docstring() -> None:
    fields = {field.path: field for field in describe_fields()}
    assert [path for path, field in fields.items() if not field.doc] == []
    assert fields["optim.lr"].doc == "Peak learning rate."
    assert fields["optim.lr"].default == "0.0003"
    assert fields["name"].section == ""
    assert fields["memory.loss_chunk_tokens"].type == "a whole number or auto"


def test_json_schema_is_as_strict_as_the_loader() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    for section in section_classes():
        assert schema["properties"][section]["additionalProperties"] is False
    rate = schema["properties"]["optim"]["properties"]["lr"]
    assert rate == {"type": "number", "description": "Peak learning rate.", "default": 3e-4}
    assert "string" in schema["properties"]["model"]["type"]
    assert "string" not in schema["properties"]["optim"]["type"]


def test_docs_hold_the_reference_of_this_schema() -> None:
    hint = (
        "docs/configuration.md is stale: put `shardwise config schema --markdown` between its marks"
    )
    assert markdown_reference().strip() in DOCS.read_text(encoding="utf-8"), hint
