"""A row of preferences: two answers to one prompt, or one answer with a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.data.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Turn,
    answer_turns,
    asked_turns,
    chat_turns,
    read_tools,
    system_turn,
    untrained,
    validate_order,
)
from shardwise.data.records import CorruptRecord

Turns = list[Turn]
# Keys of conversations.
CHATS = ("messages", "conversations")


@dataclass(frozen=True, slots=True)
class Preference:
    """Conversations that share their prompt, and which of their answers are preferred."""

    conversations: tuple[Conversation, ...]
    preferred: tuple[bool, ...]
    prompt: Conversation
    """What comes before the answers. It decides whether the row is held out, so that no prompt is
    on both sides."""


def read_preference(row: Mapping[str, Any], form: str) -> Preference:
    """The answers of a row, whose form is `pairs` or `labelled`.

    Raises CorruptRecord for a row that is none, or has nothing to compare.
    """
    present = {key: value for key, value in row.items() if value is not None}
    tools = read_tools(present.get("tools"))
    asked, answers = _read_pair(present) if form == "pairs" else _read_labelled(present)
    for turns, _ in answers:
        validate_order(asked + turns)
    return Preference(
        tuple(Conversation(tuple(asked + turns), tools) for turns, _ in answers),
        tuple(is_preferred for _, is_preferred in answers),
        Conversation(tuple(asked), tools),
    )


def _read_pair(row: Mapping[str, Any]) -> tuple[Turns, list[tuple[Turns, bool]]]:
    """The prompt, then the chosen and the rejected answer."""
    _validate_keys(row, "chosen", "rejected")
    chosen, rejected = (answer_turns(row, key) for key in ("chosen", "rejected"))
    asked = _asked(row)
    if not _has_prompt(row) or (_is_whole(chosen) and _is_whole(rejected)):
        shared = _shared(chosen, rejected)
        _validate_begins(asked, chosen[:shared])
        has_system = shared > 0 and chosen[0].role in SYSTEM_ROLES
        before = [] if has_system else system_turn(row)
        asked = before + untrained(chosen[:shared])
        chosen, rejected = chosen[shared:], rejected[shared:]
    if chosen == rejected:
        raise CorruptRecord("'chosen' and 'rejected' are the same")
    for key, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns or turns[0].role != "assistant":
            raise CorruptRecord(f"{key!r} has no answer where it differs from the other one")
    return asked, [(chosen, True), (rejected, False)]


def _read_labelled(row: Mapping[str, Any]) -> tuple[Turns, list[tuple[Turns, bool]]]:
    """The prompt and its one answer, which may be the last turn of a conversation."""
    is_chat = "completion" not in row and any(key in row for key in CHATS)
    _validate_keys(row, *(() if is_chat else ("prompt", "completion")), "label")
    label = row["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise CorruptRecord("'label' is neither true nor false", repr(label)[:80])
    if is_chat:
        turns = chat_turns(row)
        return untrained(turns[:-1]), [(turns[-1:], bool(label))]
    asked = system_turn(row) + asked_turns(row["prompt"])
    return asked, [(answer_turns(row, "completion"), bool(label))]


def _asked(row: Mapping[str, Any]) -> Turns:
    """The turns before the answers of a pair: its prompt, or the conversation so far."""
    if "prompt" in row:
        return system_turn(row) + asked_turns(row["prompt"])
    return untrained(chat_turns(row)) if _has_prompt(row) else system_turn(row)


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return any(key in row for key in ("prompt", *CHATS))


def _validate_keys(row: Mapping[str, Any], *keys: str) -> None:
    if any(key not in row for key in keys):
        raise CorruptRecord(f"it has no {' and '.join(keys)}")


def _is_whole(turns: Turns) -> bool:
    """Whether these turns are a conversation with its prompt."""
    return bool(turns) and turns[0].role in (*SYSTEM_ROLES, "user")


def _shared(chosen: Turns, rejected: Turns) -> int:
    """How many turns both begin with."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))


def _validate_begins(asked: Turns, shared: Turns) -> None:
    """Raise where a row's own prompt is not how its conversations begin."""

    def said(turns: Turns) -> list[tuple[str, str]]:
        return [(turn.role, turn.content) for turn in turns if turn.role not in SYSTEM_ROLES]

    if said(asked) != said(shared)[: len(said(asked))]:
        raise CorruptRecord("'prompt' is not how 'chosen' and 'rejected' begin")
