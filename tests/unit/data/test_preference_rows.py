"""Rows of preferences: which answers they compare, how pairs share windows, and bad rows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, make_backend

from shardwise.config.schema import DataConfig
from shardwise.data.conversations import StoredConversations, prepare_conversations
from shardwise.data.loader import BatchLoader, eval_batches
from shardwise.data.preference_rows import read_preference
from shardwise.data.records import CorruptRecord
from shardwise.data.sequences import IGNORE_INDEX, PADDING
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import HubTokenizer
from shardwise.data.windows import ConversationWindows
from shardwise.errors import UserError

TOKENIZER = HubTokenizer("made", make_backend())
TEMPLATE = ChatTemplate(TOKENIZER, CHATML)
SEQ_LEN = 160


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": "c"},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        # As LLaMA-Factory has them.
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
        {"messages": [user("a")], "chosen": assistant("b"), "rejected": "c"},
        # The prompt once more, as in UltraFeedback.
        {
            "prompt": "a",
            "chosen": [user("a"), assistant("b")],
            "rejected": [user("a"), assistant("c")],
        },
    ],
)
def test_all_forms_of_a_pair_are_the_same_pair(row: dict[str, Any]) -> None:
    found = read_preference(row, "pairs")
    said = [[(turn.role, turn.content) for turn in each.turns] for each in found.conversations]
    assert said == [[("user", "a"), ("assistant", "b")], [("user", "a"), ("assistant", "c")]]
    assert [turn.content for turn in found.prompt.turns] == ["a"]
    assert found.preferred == (True, False)
    trained = [[turn.is_trained for turn in each.turns] for each in found.conversations]
    assert trained == [[False, True], [False, True]]


def test_answers_before_the_first_difference_belong_to_the_prompt() -> None:
    before = [SYSTEM, user("a"), assistant("b"), user("c")]
    row = {
        "chosen": [*before, assistant("d"), user("e"), assistant("f")],
        "rejected": [*before, assistant("x")],
    }
    chosen, rejected = read_preference(row, "pairs").conversations
    assert [turn.content for turn in chosen.turns if turn.is_trained] == ["d", "f"]
    assert [turn.content for turn in rejected.turns if turn.is_trained] == ["x"]


@pytest.mark.parametrize("label", [True, 1, False, 0])
def test_labels(label: Any) -> None:
    found = read_preference({"prompt": "a", "completion": "b", "label": label}, "labelled")
    assert found.preferred == (bool(label),) and len(found.conversations) == 1
    turns = [user("x"), assistant("y"), user("a"), assistant("b")]
    (chat,) = read_preference({"messages": turns, "label": label}, "labelled").conversations
    assert [turn.is_trained for turn in chat.turns] == [False, False, False, True]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("pairs", {"prompt": "a", "chosen": "b"}, "it has no chosen and rejected"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ("pairs", {"chosen": "b", "rejected": "c"}, "an assistant turn comes first"),
    ("pairs", {"prompt": "a", "chosen": "", "rejected": "c"}, "is empty"),
    ("pairs", {"prompt": "a", "chosen": 1, "rejected": "c"}, "'chosen' is not a list but int"),
    (
        "pairs",
        {"chosen": [user("a"), assistant("b")], "rejected": [user("z"), assistant("c")]},
        "'chosen' has no answer where it differs from the other one",
    ),
    (
        "pairs",
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a")]},
        "'rejected' has no answer where it differs from the other one",
    ),
    (
        "pairs",
        {
            "prompt": "z",
            "chosen": [user("a"), assistant("b")],
            "rejected": [user("a"), assistant("c")],
        },
        "'prompt' is not how 'chosen' and 'rejected' begin",
    ),
    ("pairs", {"prompt": [SYSTEM, SYSTEM], "chosen": "b", "rejected": "c"}, "two system turns"),
    ("labelled", {"prompt": "a", "completion": "b"}, "it has no prompt and completion and label"),
    ("labelled", {"messages": [], "label": True}, "no assistant turn"),
    ("labelled", {"messages": [user("a")], "label": True}, "no assistant turn"),
    ("labelled", {"prompt": "a", "completion": "b", "label": "yes"}, "neither true nor false"),
]


@pytest.mark.parametrize(("form", "row", "why"), BAD)
def test_rows_that_compare_nothing(form: str, row: dict[str, Any], why: str) -> None:
    with pytest.raises(CorruptRecord, match=why):
        read_preference(row, form)


def write_pairs(path: Path, num_rows: int = 40, *bad: dict[str, Any]) -> DataConfig:
    draw = random.Random(num_rows)

    def words() -> str:
        return "x" * draw.randint(1, 24)

    rows: list[dict[str, Any]] = [
        {"prompt": f"p{number} {words()}", "chosen": f"c{words()}", "rejected": f"r{words()}"}
        for number in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    return DataConfig(source="jsonl", path=str(path), format="pairs", seq_len=SEQ_LEN)


def prepared(config: DataConfig, folder: Path) -> StoredConversations:
    return prepare_conversations(config, TOKENIZER, TEMPLATE, folder / "cache")


def windows_of(stored: StoredConversations, split: str = "train") -> ConversationWindows:
    return ConversationWindows(
        stored, stored.splits[split], SEQ_LEN, TOKENIZER.eos_id, keeps_documents_apart=True
    )


@pytest.mark.parametrize("packing", ["auto", "one"])
def test_both_answers_of_a_pair_are_in_one_window(tmp_path: Path, packing: Any) -> None:
    config = replace(write_pairs(tmp_path / "a.jsonl"), packing=packing, eval_fraction=0.25)
    stored, seen = prepared(config, tmp_path), []
    assert config.keeps_documents_apart
    for split in ("train", "eval"):
        windows = windows_of(stored, split)
        for index in range(len(windows)):
            inputs, labels, starts, compared = windows.get(index)
            assert starts is not None and compared is not None
            parts = list(zip(compared.numbers, np.split(inputs, starts[1:]), strict=True))
            texts = [TOKENIZER.backend.decode(p) for number, p in parts if number != PADDING]
            assert len(texts) % 2 == 0 and (packing == "auto" or len(texts) == 2)
            for chosen, rejected in zip(texts[0::2], texts[1::2], strict=True):
                prompts = {text.partition("assistant")[0] for text in (chosen, rejected)}
                assert len(prompts) == 1
                assert "assistant\nc" in chosen and "assistant\nr" in rejected
            documents = compared.numbers[compared.numbers != PADDING]
            assert (documents % 2 == np.arange(len(documents)) % 2).all()
            assert (compared.preferred[: len(documents)] == (documents % 2 == 0)).all()
            seen += documents.tolist()
            # The first token of a document is no label of the one before it.
            assert (labels[starts[1:] - 1] == IGNORE_INDEX).all()
    assert sorted(seen) == list(range(80))
    assert stored.counts["conversations"] + stored.splits["eval"].num_conversations == 40


def test_compared_documents_of_a_micro_batch(tmp_path: Path) -> None:
    windows = windows_of(prepared(write_pairs(tmp_path / "a.jsonl"), tmp_path))
    how: dict[str, Any] = {"seed": 0, "shuffle": True, "rank": 0, "num_ranks": 1}
    loader = BatchLoader(windows, global_batch=2, micro_batch=2, accumulation=1, **how)
    (batch,) = loader.step_batches(0)
    found = batch.compared
    assert found is not None
    assert int(found.lengths.sum()) == 2 * SEQ_LEN
    assert int(found.num_tokens.sum()) == batch.num_valid_tokens
    # Rows beyond the end of what is held out have no documents.
    *_, last = eval_batches(windows, num_sequences=1, micro_batch=4, rank=0, num_ranks=1)
    assert last.compared is not None
    first = windows.get(0).compared
    assert first is not None
    assert len(last.compared) == (first.numbers != PADDING).sum()


def test_prompts_are_cut_alike_so_that_a_pair_fits(tmp_path: Path) -> None:
    long = {"prompt": "hello " * 200, "chosen": "yes", "rejected": "no"}
    config = write_pairs(tmp_path / "a.jsonl", 4, long)
    stored = prepared(config, tmp_path)
    assert stored.num_cut == 1 and stored.cut == (f"{tmp_path}/a.jsonl:5",)
    assert "1 pairs are cut to data.seq_len 160" in stored.in_words(SEQ_LEN)[1]
    windows = windows_of(stored)
    texts = [TOKENIZER.backend.decode(windows.get(at).inputs) for at in range(len(windows))]
    (cut,) = (text for text in texts if " … " in text)
    halves = cut.split("assistant")[:2]
    assert halves[0].split("user")[1] == halves[1].split("user")[1]


def test_bad_rows_are_named_and_beyond_a_limit_refused(tmp_path: Path) -> None:
    bad = [row for form, row, _ in BAD if form == "pairs"]
    endless = {"prompt": "a", "chosen": "hello " * 200, "rejected": "no"}
    config = write_pairs(tmp_path / "a.jsonl", 4, *bad, endless)
    stored = prepared(config, tmp_path)
    assert len(stored.skipped) == len(bad) + 1
    assert "its answers do not fit into data.seq_len" in stored.skipped[-1]
    with pytest.raises(UserError, match="cannot be trained on"):
        prepared(replace(config, max_corrupt=2), tmp_path)
    nothing = write_pairs(tmp_path / "b.jsonl", 0, *bad)
    with pytest.raises(UserError, match="no pair to train on"):
        prepared(nothing, tmp_path)
