"""A row of data as a conversation: its turns and tools, whichever form the row has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.data.records import CorruptRecord, valid_text

# What ShareGPT's rows call roles.
_SHAREGPT_ROLES = {
    **{"human": "user", "gpt": "assistant"},
    **{"chatgpt": "assistant", "observation": "tool", "function_response": "tool"},
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
# The keys without which a row does not have the form.
FORMS = {
    "chat": (("messages",), ("conversations",)),
    "prompt": (("prompt", "completion"),),
    "instruction": (("instruction", "output"),),
}
# Every key of a row that is looked at.
ROW_KEYS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("system", "tools", "chosen", "rejected", "label"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says."""

    role: str
    content: str
    is_trained: bool = False
    """Whether the loss is computed on it."""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """What else a template may look at, such as `tool_calls` and `reasoning_content`."""

    def message(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        return {"role": self.role, "content": self.content, **self.rest}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order, and the tools that the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def text(self) -> str:
        """All that is said, which is the same for the same conversation in another form."""
        said = [turn.message() for turn in self.turns]
        return json.dumps([said, list(self.tools)], sort_keys=True, default=str)


def read_conversation(row: Mapping[str, Any], form: str) -> Conversation:
    """The conversation of a row, whose form is a key of FORMS, or `auto`: its keys tell.

    Raises CorruptRecord for a row that is none, or has nothing to train on.
    """
    present = {key: value for key, value in row.items() if value is not None}
    match _form_of(present, form):
        case "chat":
            turns = chat_turns(present)
        case "prompt":
            turns = _prompt_turns(present)
        case _:
            turns = _instruction_turns(present)
    validate_order(turns)
    return Conversation(tuple(turns), read_tools(present.get("tools")))


def _form_of(row: Mapping[str, Any], form: str) -> str:
    def has(name: str) -> bool:
        return any(all(key in row for key in keys) for keys in FORMS[name])

    wanted = FORMS if form == "auto" else (form,)
    found = [name for name in wanted if has(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CorruptRecord(
            f"its keys have several forms; data.format chooses {' or '.join(found)}"
        )
    needed = (" and ".join(keys) for name in wanted for keys in FORMS[name])
    raise CorruptRecord(f"it has no {', or '.join(needed)}")


def chat_turns(row: Mapping[str, Any]) -> list[Turn]:
    """The turns of `messages` or `conversations`, and of the row's own `system`."""
    if "messages" in row:
        return system_turn(row) + turns_of(row["messages"], "messages")
    return system_turn(row) + turns_of(row["conversations"], "conversations")


def _from_sharegpt(value: dict[str, Any]) -> dict[str, Any]:
    """`from` and `value` as `role` and `content`. Some rows have the latter already."""
    names = {"from": "role", "value": "content"}
    message = {names.get(key, key): item for key, item in value.items()}
    role = message.get("role")
    if role == "function_call":
        calls = _calls_of(message.get("content"))
        return message | {"role": "assistant", "content": "", "tool_calls": calls}
    return message | {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role}


def _calls_of(content: object) -> list[dict[str, Any]]:
    """The calls of a turn that holds nothing else, as JSON: one, or a list of them."""
    try:
        found = json.loads(valid_text(content, "function_call"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptRecord("a function call is not JSON") from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise CorruptRecord("a function call has no name")
    return [{"type": "function", "function": call} for call in calls]


def _prompt_turns(row: Mapping[str, Any]) -> list[Turn]:
    """Both are texts or lists of turns. Only the completion is trained on."""
    return system_turn(row) + asked_turns(row["prompt"]) + answer_turns(row, "completion")


def asked_turns(prompt: object) -> list[Turn]:
    """The turns of a prompt, a text or a list, none of which is trained on."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return untrained(turns_of(prompt, "prompt"))


def untrained(turns: list[Turn]) -> list[Turn]:
    """The same turns as a prompt has them."""
    return [replace(turn, is_trained=False) for turn in turns]


def answer_turns(row: Mapping[str, Any], key: str) -> list[Turn]:
    """The turns of an answer: a text, a message or a list of them."""
    answer = row[key]
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    return turns_of([answer] if isinstance(answer, dict) else answer, key)


def _instruction_turns(row: Mapping[str, Any]) -> list[Turn]:
    asked = [valid_text(row[key], key) for key in ("instruction", "input") if row.get(key)]
    messages = [
        {"role": "user", "content": "\n\n".join(asked)},
        {"role": "assistant", "content": row["output"]},
    ]
    return system_turn(row) + turns_of(messages, "output")


def system_turn(row: Mapping[str, Any]) -> list[Turn]:
    """The row's own `system`, where it has one."""
    text = row.get("system")
    return [Turn("system", valid_text(text, "system"))] if text else []


def turns_of(messages: object, key: str) -> list[Turn]:
    """The turns of a list of messages, which is under `key` in its row."""
    if not isinstance(messages, list):
        raise CorruptRecord(f"{key!r} is not a list but {type(messages).__name__}")
    return [_turn_of(message) for message in messages]


def _turn_of(message: object) -> Turn:
    if not isinstance(message, dict):
        raise CorruptRecord(f"a turn is not an object but {type(message).__name__}")
    message = _from_sharegpt(message)
    role = message.get("role")
    if role is None:
        raise CorruptRecord("a turn has no role")
    if role not in _ROLES:
        raise CorruptRecord(f"a turn has a role other than {', '.join(_ROLES)}", repr(role)[:80])
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "weight") and value is not None
    }
    content = _text_of(message.get("content"))
    says_more = any(rest.get(key) for key in ("tool_calls", "reasoning_content", "thinking"))
    # A system turn without text is usual in tables, and a tool may have nothing to say.
    if not content and not says_more and role in ("user", "assistant"):
        raise CorruptRecord(f"the content of a turn of the {role} is empty")
    # OpenAI's rows say `weight: 0` for answers that are not trained on.
    return Turn(role, content, role == "assistant" and message.get("weight") != 0, rest)


def _text_of(content: object) -> str:
    """The text of a turn, whose parts are joined where it has several."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return valid_text(content, "content")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise CorruptRecord("the content of a turn has parts that are not text")
    return "".join(valid_text(part.get("text"), "text") for part in content)


def read_tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row: a list of objects, or the same as JSON."""
    if isinstance(tools, str):  # tables keep them as JSON, because each has keys of its own
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError) as error:
            raise CorruptRecord("'tools' is not JSON") from error
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CorruptRecord("'tools' is not a list of objects")
    return tuple(_tool_of(tool) for tool in tools)


def _tool_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as templates take it. Some rows have the function alone."""
    is_bare = "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool


def validate_order(turns: list[Turn]) -> None:
    """Raise for what no template should be asked. It decides about the rest."""
    roles = [turn.role for turn in turns]
    systems = [index for index, role in enumerate(roles) if role in SYSTEM_ROLES]
    if len(systems) > 1:
        raise CorruptRecord("two system turns")
    if systems and systems[0] > 0:
        raise CorruptRecord("the system turn is not the first")
    if "assistant" not in roles:
        raise CorruptRecord("no assistant turn")
    if roles[len(systems)] == "assistant":
        raise CorruptRecord("an assistant turn comes first")
    if not any(turn.is_trained for turn in turns):
        raise CorruptRecord("no assistant turn is trained on")
