"""Masks of made templates against what each is known to write for an answer.

1,000 conversations run always; 10,000 where SHARDWISE_CHAOS is set.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from chat_templates import (
    CALL,
    FORGETFUL,
    MADE,
    MARKED,
    MARKED_FORGETFUL,
    OPEN_THINKING,
    PLAIN,
    make_backend,
)
from tokenizers import pre_tokenizers, processors

from shardwise.data.conversation import Conversation, read_conversation
from shardwise.data.masking import AnswerPlace, Example, build_example, mark_tokens
from shardwise.data.records import CorruptRecord
from shardwise.data.template import ChatTemplate, load_chat_template
from shardwise.data.tokenizer import ByteTokenizer, HubTokenizer
from shardwise.errors import UserError

NUM_CONVERSATIONS = 10_000 if os.environ.get("SHARDWISE_CHAOS") else 1_000
TOKENIZER = HubTokenizer("made", make_backend())
WORDS = ("hello", "world", "naïve", "天気", "x = 1\n", "  two", "<b>", "…", "🙂", "[INST", "\t")


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(TOKENIZER, source)


def chat(*messages: dict[str, Any], **more: Any) -> Conversation:
    return read_conversation({"messages": list(messages), **more}, "auto")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def text_of(ids: np.ndarray) -> str:
    return TOKENIZER.backend.decode(ids.tolist(), skip_special_tokens=False)


def trained_text(example: Example) -> str:
    return text_of(example.ids[example.mask])


def some_text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))


def some_messages(draw: random.Random, *, strict: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if not strict and draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(["", some_text(draw)])})
    for _ in range(draw.randint(1, 4)):
        messages.append(user(some_text(draw)))
        answer = assistant(some_text(draw))
        if not strict and draw.random() < 0.3:
            answer |= {"reasoning_content": some_text(draw)}
        if not strict and draw.random() < 0.3:
            called = assistant("", tool_calls=[CALL] * draw.randint(1, 2))
            messages += [called, {"role": "tool", "content": draw.choice(["", some_text(draw)])}]
        messages.append(answer)
    if draw.random() < 0.2:
        messages.append(user(some_text(draw)))
    return messages


@pytest.mark.parametrize("name", MADE)
def test_every_token_of_an_answer_is_trained_on_and_no_other(name: str) -> None:
    made, draw = MADE[name], random.Random(name)
    template = template_of(made.source)
    for number in range(NUM_CONVERSATIONS // len(MADE)):
        messages = some_messages(draw, strict=made.strict)
        if name == "llama":  # it has no calls
            messages = [m for m in messages if m["content"] or m["role"] != "assistant"]
        example = build_example(chat(*messages), template, 10**6, str(number))
        answers = [made.answer(m) for m in messages if m["role"] == "assistant"]
        assert trained_text(example) == "".join(answers), messages
        runs = np.flatnonzero(np.diff(example.mask, prepend=False, append=False)).reshape(-1, 2)
        assert [text_of(example.ids[slice(*run)]) for run in runs] == answers
        whole = template.render(chat(*messages).turns)
        assert text_of(example.ids) == whole


@pytest.mark.parametrize("source", [MARKED, PLAIN], ids=["by marks", "by prefixes"])
def test_marks_of_a_template_give_the_same_mask(source: str) -> None:
    template, draw = template_of(source), random.Random(7)
    for _ in range(NUM_CONVERSATIONS // 10):
        messages = some_messages(draw, strict=False)
        example = build_example(chat(*messages), template, 10**6, "row")
        theirs = TOKENIZER.backend.apply_chat_template(
            messages,
            chat_template=MARKED,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert example.ids.tolist() == theirs["input_ids"]
        assert example.mask.astype(int).tolist() == theirs["assistant_masks"]


def test_tools_are_rendered_and_calls_are_trained_on() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    conversation = chat(user("hello"), assistant("", tool_calls=[CALL]), tools=[tool])
    example = build_example(conversation, template_of(MADE["chatml"].source), 4096, "row")
    assert "# Tools" in text_of(example.ids)
    assert trained_text(example).startswith("\n<tool_call>")
    assert trained_text(example).endswith("</tool_call><|im_end|>\n")


def test_only_the_completion_and_turns_with_weight_are_trained_on() -> None:
    template = template_of(MADE["chatml"].source)
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    example = build_example(read_conversation(row, "prompt"), template, 4096, "row")
    assert trained_text(example) == "d<|im_end|>\n"
    weighted = chat(user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1))
    assert trained_text(build_example(weighted, template, 4096, "row")) == "d<|im_end|>\n"


def test_a_template_that_drops_earlier_reasoning_is_refused_at_its_turn() -> None:
    conversation = chat(
        user("a"),
        assistant("b", reasoning_content="first"),
        user("c"),
        assistant("d", reasoning_content="second"),
    )
    with pytest.raises(UserError, match="not prefix-stable") as caught:
        build_example(conversation, template_of(FORGETFUL), 4096, "chat.jsonl:7")
    assert "rendered in another way when others follow it (chat.jsonl:7, turn 2)" in str(
        caught.value
    )
    assert "it writes '<think>" in caught.value.why and "and then 'b<|im_end|>" in caught.value.why
    assert "data.chat_template=FILE" in caught.value.fix
    # One turn alone has nothing earlier, so that nothing is dropped.
    alone = chat(user("a"), assistant("b", reasoning_content="first"))
    example = build_example(alone, template_of(FORGETFUL), 4096, "row")
    assert trained_text(example) == "<think>\nfirst\n</think>\n\nb<|im_end|>\n"


def test_marks_make_up_for_a_template_that_is_not_prefix_stable() -> None:
    thought = {"reasoning_content": "r"}
    conversation = chat(user("a"), assistant("b", **thought), user("c"), assistant("d", **thought))
    example = build_example(conversation, template_of(MARKED_FORGETFUL), 4096, "row")
    assert trained_text(example) == "b<|im_end|>\n<think>\nr\n</think>\n\nd<|im_end|>\n"
    # Marks do not say which of the answers are wanted.
    first, second = assistant("b", weight=0, **thought), assistant("d", **thought)
    with pytest.raises(UserError, match="not prefix-stable"):
        build_example(
            chat(user("a"), second, user("c"), first), template_of(MARKED_FORGETFUL), 4096, "row"
        )


def test_a_template_that_opens_answers_in_another_way_is_refused() -> None:
    with pytest.raises(UserError, match="what opens the answer is not how the answer begins"):
        build_example(chat(user("a"), assistant("b")), template_of(OPEN_THINKING), 4096, "row")


def test_what_a_template_refuses_is_a_reason_to_skip() -> None:
    first = chat(user("hello"), user("a"), assistant("b"))
    with pytest.raises(CorruptRecord, match=r"the chat template refuses it \(.*must alternate"):
        build_example(first, template_of(MADE["gemma"].source), 4096, "row")
    # Another template takes it.
    example = build_example(first, template_of(MADE["chatml"].source), 4096, "row")
    assert trained_text(example) == "b<|im_end|>\n"
    broken = template_of("{{ messages[0].content + 1 }}")
    with pytest.raises(CorruptRecord, match=r"refuses it \(TypeError"):
        build_example(first, broken, 4096, "row")


def test_a_template_with_a_syntax_error_is_the_users() -> None:
    with pytest.raises(UserError, match="the chat template cannot be read") as caught:
        build_example(chat(user("a"), assistant("b")), template_of("\n{% if %}"), 4096, "row")
    assert "line 2" in caught.value.why


def test_a_template_that_writes_no_answer_trains_on_nothing() -> None:
    silent = template_of("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
                         "{% endif %}{% endfor %}")  # fmt: skip
    with pytest.raises(CorruptRecord, match="no token is trained on"):
        build_example(chat(user("a"), assistant("b")), silent, 4096, "row")


def test_long_questions_are_cut_in_their_middle_and_answers_are_kept() -> None:
    template = template_of(MADE["chatml"].source)
    question = "begin " + "middle " * 500 + "end"
    conversation = chat(user("short"), assistant("one"), user(question), assistant("two"))
    whole = build_example(conversation, template, 10**6, "row")
    assert not whole.is_cut
    exact = build_example(conversation, template, len(whole.ids), "row")
    assert not exact.is_cut
    for seq_len in (len(whole.ids) - 1, 400, 200):
        example = build_example(conversation, template, seq_len, "row")
        assert example.is_cut
        assert seq_len - 16 < len(example.ids) <= seq_len
        assert trained_text(example) == "one<|im_end|>\ntwo<|im_end|>\n"
        text = text_of(example.ids)
        assert "begin" in text and "end<|im_end|>" in text and " … " in text and "short" in text


def test_an_answer_that_does_not_fit_is_never_cut() -> None:
    template = template_of(MADE["chatml"].source)
    for question in ("short", "long " * 500):
        conversation = chat(user(question), assistant("answer " * 500))
        with pytest.raises(CorruptRecord, match=r"its answers do not fit into data.seq_len \(\d+"):
            build_example(conversation, template, 256, "row")


def test_a_token_of_blanks_has_the_place_after_the_one_before() -> None:
    """Byte-level tokenizers with `trim_offsets` give blanks an empty place."""
    backend = make_backend()
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    template = ChatTemplate(HubTokenizer("trims", backend), MADE["chatml"].source)
    example = build_example(chat(user("a"), assistant("b     c  ")), template, 4096, "row")
    assert backend.decode(example.ids[example.mask].tolist()) == "b     c  <|im_end|>\n"
    places = np.array([[0, 2], [4, 4], [4, 6]])
    assert mark_tokens(places, [AnswerPlace(2, 4)]).tolist() == [False, True, False]


def test_a_token_over_the_edge_of_an_answer_is_trained_on() -> None:
    places = np.array([[0, 3], [3, 6], [6, 9]])
    assert mark_tokens(places, [AnswerPlace(5, 7)]).tolist() == [False, True, True]


def test_bytes_and_tokenizers_without_a_template_are_refused() -> None:
    with pytest.raises(UserError, match="bytes have no chat template"):
        load_chat_template(ByteTokenizer(), None)
    with pytest.raises(UserError, match="has no chat template") as caught:
        load_chat_template(TOKENIZER, None)
    assert "data.chat_template=FILE" in caught.value.fix
    with pytest.raises(UserError, match=r"data\.chat_template no/such\.jinja cannot be read"):
        load_chat_template(TOKENIZER, "no/such.jinja")
