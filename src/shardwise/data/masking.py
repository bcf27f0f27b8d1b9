"""Token ids of a conversation, and which of them are trained on.

A template may mark what the assistant writes. Any other is asked what it writes for the turns
before an answer, up to where the answer begins, and what it writes with the answer. The difference
is what the model must produce, with the end of its turn. No knowledge of a template is needed, but
each text must begin with the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import draw_of
from shardwise.data.conversation import Conversation
from shardwise.data.records import CorruptRecord
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import TokenIds
from shardwise.errors import UserError

# Why a row is skipped that would have to lose part of an answer.
TOO_LONG = "its answers do not fit into data.seq_len"
# A turn that is cut keeps at least this many characters. With fewer it says nothing.
_LEAST_CHARACTERS = 64
_CUT = " … "
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens."""

    ids: TokenIds
    mask: NDArray[np.bool_]
    """Whether the loss is computed on a token."""
    document: str
    """The row that it comes from, which does not change between runs."""
    draw: int = 0
    """What the conversation says decides this number, whatever renders it. It says whether the
    conversation is held out."""
    is_cut: bool = False
    """Whether questions were cut, because the whole is longer than a sequence."""
    is_preferred: bool = True
    """Whether its answer is one that a model should prefer; all are but in preference data."""


class TooLong(CorruptRecord):
    """A conversation whose answers a window has no room for."""

    fix = "write a larger data.seq_len"


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Characters of a rendered conversation, the last one excluded."""

    start: int
    end: int


def build_example(
    conversation: Conversation, template: ChatTemplate, seq_len: int | None, document: str
) -> Example:
    """The tokens of a conversation, at most `seq_len` of them where that is given."""
    (example,) = build_together((conversation,), template, seq_len, document)
    return example


def build_together(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    seq_len: int | None,
    document: str,
) -> tuple[Example, ...]:
    """The tokens of conversations that share a window of `seq_len` tokens, where that is given.

    Longer ones keep their answers: other turns are cut in their middle, the longest first, and in
    all conversations alike. Raises CorruptRecord where answers do not fit, and UserError for a
    template that is not prefix-stable.
    """

    def built(limit: int | None) -> tuple[Example, ...]:
        cut = conversations if limit is None else [_cut(each, limit) for each in conversations]
        return tuple(_example_of(each, template, document) for each in cut)

    def length(examples: tuple[Example, ...]) -> int:
        return sum(len(example.ids) for example in examples)

    whole = built(None)
    if seq_len is None or length(whole) <= seq_len:
        return whole
    # The largest number of characters to which turns can be cut, found by bisection.
    fits, too_long = _LEAST_CHARACTERS - 1, max(map(_longest_question, conversations))
    best = None
    while too_long - fits > 1:
        limit = (fits + too_long) // 2
        shorter = built(limit)
        if length(shorter) <= seq_len:
            fits, best = limit, shorter
        else:
            too_long = limit
    if best is None:
        raise TooLong(TOO_LONG, f"{length(whole)} tokens")
    pairs = zip(whole, best, strict=True)
    return tuple(replace(cut, draw=each.draw, is_cut=True) for each, cut in pairs)


def find_answers(
    conversation: Conversation, template: ChatTemplate, document: str
) -> tuple[str, list[AnswerPlace]]:
    """The rendered conversation, and the answers in it that are trained on."""
    turns, tools = conversation.turns, conversation.tools
    # Marks do not say which turn they belong to.
    trains_all = all(turn.is_trained for turn in turns if turn.role == "assistant")
    if trains_all and template.marks_answers(tools):
        text, marked = template.render_marked(turns, tools)
        return text, [AnswerPlace(start, end) for start, end in marked]
    text = template.render(turns, tools)
    answers = []
    for index, turn in enumerate(turns):
        if not turn.is_trained:
            continue
        before = template.render(turns[:index], tools, opens_answer=True)
        after = template.render(turns[: index + 1], tools)
        place = f"{document}, turn {index + 1}"
        if not after.startswith(before):
            raise _unstable(
                place, "what opens the answer is not how the answer begins", before, after
            )
        if not text.startswith(after):
            raise _unstable(
                place, "the turn is rendered in another way when others follow it", after, text
            )
        answers.append(AnswerPlace(len(before), len(after)))
    return text, answers


def mark_tokens(places: NDArray[np.int64], answers: list[AnswerPlace]) -> NDArray[np.bool_]:
    """Which tokens have a character in an answer, as in transformers' own masks."""
    starts, ends = places[:, 0].copy(), places[:, 1]
    # Byte-level tokenizers may leave blanks out of the places, so that a token of blanks has an
    # empty one. Such a token begins where the one before it ends.
    empty = np.flatnonzero(starts == ends)
    starts[empty] = np.where(empty > 0, ends[empty - 1], 0)
    mask = np.zeros(len(places), dtype=np.bool_)
    for answer in answers:
        mask |= (starts < answer.end) & (ends > answer.start)
    return mask


def _example_of(conversation: Conversation, template: ChatTemplate, document: str) -> Example:
    text, answers = find_answers(conversation, template, document)
    ids, places = template.encode(text)
    mask = mark_tokens(places, answers)
    # Nothing comes before the first token from which it could be predicted.
    mask[:1] = False
    if not mask.any():
        raise CorruptRecord("no token is trained on")
    return Example(ids, mask, document, draw_of(conversation.text()))


def _longest_question(conversation: Conversation) -> int:
    return max(
        (len(turn.content) for turn in conversation.turns if turn.role != "assistant"), default=0
    )


def _cut(conversation: Conversation, limit: int) -> Conversation:
    """Turns of others than the assistant with at most `limit` characters, from both their ends."""
    head = (limit - len(_CUT)) // 2
    tail = limit - len(_CUT) - head
    turns = tuple(
        replace(turn, content=turn.content[:head] + _CUT + turn.content[-tail:])
        if turn.role != "assistant" and len(turn.content) > limit
        else turn
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns)


def _unstable(place: str, reason: str, expected: str, found: str) -> UserError:
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)

    def shown(text: str) -> str:
        return repr(text[at : at + _SHOWN_CHARACTERS]) if text[at:] else "nothing more"

    return UserError(
        f"the chat template is not prefix-stable: {reason} ({place})",
        why=f"after {expected[max(0, at - _SHOWN_CHARACTERS) : at]!r} it writes {shown(expected)} "
        f"and then {shown(found)}, so that the tokens to train on are not known",
        fix="write data.chat_template=FILE with a template that renders every turn alike whatever "
        "follows it, such as one that keeps the reasoning of earlier turns",
    )
