"""Rows of every form as conversations, and rows that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.data.conversation import Conversation, Turn, read_conversation
from shardwise.data.records import CorruptRecord

USER, ASSISTANT = Turn("user", "a"), Turn("assistant", "b", is_trained=True)
SYSTEM = Turn("system", "s")
ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("form", "row", "turns"),
    [
        ("chat", {"messages": [ASKED, ANSWERED]}, (USER, ASSISTANT)),
        ("chat", {"messages": [ASKED, ANSWERED], "system": "s"}, (SYSTEM, USER, ASSISTANT)),
        (
            "chat",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            (USER, ASSISTANT),
        ),
        ("chat", {"conversations": [ASKED, ANSWERED]}, (USER, ASSISTANT)),
        ("prompt", {"prompt": "a", "completion": "b"}, (USER, ASSISTANT)),
        ("prompt", {"prompt": [ASKED], "completion": [ANSWERED]}, (USER, ASSISTANT)),
        ("instruction", {"instruction": "a", "output": "b"}, (USER, ASSISTANT)),
        ("instruction", {"instruction": "a", "input": "", "output": "b"}, (USER, ASSISTANT)),
        (
            "instruction",
            {"instruction": "x", "input": "y", "output": "b", "system": "s"},
            (SYSTEM, Turn("user", "x\n\ny"), ASSISTANT),
        ),
    ],
)
def test_every_form_is_told_by_its_keys(
    form: str, row: dict[str, Any], turns: tuple[Turn, ...]
) -> None:
    assert read_conversation(row, form) == Conversation(turns)
    assert read_conversation(row, "auto") == Conversation(turns)
    # Tables have a column for every key of any row.
    assert read_conversation(row | {"tools": None}, "auto") == Conversation(turns)


def test_a_row_of_several_forms_has_the_one_that_is_named() -> None:
    row = {"messages": [ASKED, ANSWERED], "prompt": "p", "completion": "c"}
    with pytest.raises(CorruptRecord, match=r"data\.format chooses chat or prompt"):
        read_conversation(row, "auto")
    assert read_conversation(row, "chat").turns == (USER, ASSISTANT)
    assert read_conversation(row, "prompt").turns[0].content == "p"
    # A prompt alone is no form. Some tables repeat the first question there.
    assert read_conversation({"messages": [ASKED, ANSWERED], "prompt": "a"}, "auto").turns


def test_tools_and_what_templates_look_at_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    seen = {"role": "tool", "content": "", "tool_call_id": "1", "name": None}
    row = {"messages": [ASKED, call, seen, ANSWERED | {"reasoning_content": "r"}]}
    for tools in ([TOOL], json.dumps([TOOL])):
        found = read_conversation(row | {"tools": tools}, "auto")
        assert found.tools == (TOOL,)
        assert [turn.message() for turn in found.turns] == [
            ASKED,
            call | {"content": ""},
            {"role": "tool", "content": "", "tool_call_id": "1"},
            ANSWERED | {"reasoning_content": "r"},
        ]
        assert [turn.is_trained for turn in found.turns] == [False, True, False, True]


def test_function_calls_of_sharegpt_are_tool_calls() -> None:
    one = {"name": "look", "arguments": {"at": "b"}}
    said = [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(one)}]
    said += [{"from": "observation", "value": "c"}, {"from": "gpt", "value": "d"}]
    found = read_conversation(
        {"conversations": said, "tools": json.dumps([{"name": "look"}])}, "chat"
    )
    assert [turn.message() for turn in found.turns] == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": one}],
        },
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert [turn.is_trained for turn in found.turns] == [False, True, False, True]
    assert found.tools == ({"type": "function", "function": {"name": "look"}},)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts}, ANSWERED]}
    assert read_conversation(row, "auto").turns[0].content == "ab"


def rows_of(*messages: object) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "it has no messages, or conversations, or prompt and completion, or"),
        ({"messages": "a"}, "'messages' is not a list but str"),
        (rows_of("a"), "a turn is not an object but str"),
        (rows_of({"content": "a"}, ANSWERED), "a turn has no role"),
        ({"conversations": [{"value": "a"}]}, "a turn has no role"),
        (rows_of({"role": "judge", "content": "a"}), "a turn has a role other than"),
        (rows_of({"role": ["user"], "content": "a"}), "a turn has a role other than"),
        (rows_of({"from": "function_call", "value": "look("}), "a function call is not JSON"),
        (rows_of({"from": "function_call", "value": "[]"}), "a function call has no name"),
        (rows_of(SYSTEM.message(), SYSTEM.message(), ASKED, ANSWERED), "two system turns"),
        (rows_of(ASKED, SYSTEM.message(), ANSWERED), "the system turn is not the first"),
        (rows_of(ASKED), "no assistant turn"),
        (rows_of(SYSTEM.message()), "no assistant turn"),
        (rows_of(), "no assistant turn"),
        (rows_of(ASKED, ANSWERED | {"weight": 0}), "no assistant turn is trained on"),
        (rows_of(ASKED, ANSWERED | {"content": ""}), "a turn of the assistant is empty"),
        (rows_of({"role": "user"}, ANSWERED), "a turn of the user is empty"),
        ({"instruction": "", "output": "b"}, "a turn of the user is empty"),
        ({"instruction": 3, "output": "b"}, "'instruction' is not a string but int"),
        ({"prompt": "a", "completion": ""}, "a turn of the assistant is empty"),
        (rows_of(ASKED | {"content": 3}, ANSWERED), "'content' is not a string but int"),
        (rows_of(ASKED | {"content": "\ud800"}, ANSWERED), "a lone surrogate"),
        (rows_of(ASKED | {"content": [{"type": "image"}]}, ANSWERED), "parts that are not text"),
        (rows_of(ASKED, ANSWERED) | {"tools": "{"}, "'tools' is not JSON"),
        (rows_of(ASKED, ANSWERED) | {"tools": ["a"]}, "'tools' is not a list of objects"),
    ],
)
def test_a_row_that_is_no_conversation_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptRecord) as caught:
        read_conversation(row, "auto")
    assert reason in caught.value.reason
