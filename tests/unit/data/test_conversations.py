"""Conversations on disk: every token of an answer is a label once, and the cache is reused."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, MARKED, make_backend

from shardwise.config.schema import DataConfig
from shardwise.data import conversations
from shardwise.data.conversations import StoredConversations, prepare_conversations
from shardwise.data.examples import read_examples
from shardwise.data.sequences import IGNORE_INDEX
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import HubTokenizer
from shardwise.data.windows import ConversationWindows
from shardwise.errors import UserError

TOKENIZER = HubTokenizer("made", make_backend())
TEMPLATE = ChatTemplate(TOKENIZER, CHATML)
SEQ_LEN = 96


def write_rows(path: Path, num_rows: int = 60, *bad: str) -> DataConfig:
    draw = random.Random(num_rows)
    rows = []
    for number in range(num_rows):
        turns = [
            {"role": role, "content": f"{role[0]}{number} " + "x" * draw.randint(0, 12)}
            for _ in range(draw.randint(1, 2))
            for role in ("user", "assistant")
        ]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join([*rows, *bad]) + "\n")
    return DataConfig(source="jsonl", path=str(path), format="auto", seq_len=SEQ_LEN)


def prepared(config: DataConfig, folder: Path, **more: Any) -> StoredConversations:
    return prepare_conversations(config, TOKENIZER, TEMPLATE, folder / "cache", **more)


def windows_of(stored: StoredConversations, split: str = "train") -> ConversationWindows:
    return ConversationWindows(
        stored, stored.splits[split], SEQ_LEN, TOKENIZER.eos_id, keeps_documents_apart=True
    )


def texts_of(windows: ConversationWindows) -> list[str]:
    """The text of every document of all windows, padding left out."""
    found = []
    for index in range(len(windows)):
        inputs, _, starts, _ = windows.get(index)
        assert starts is not None
        parts = [part for part in np.split(inputs, starts[1:]) if part[0] != TOKENIZER.eos_id]
        found += [TOKENIZER.backend.decode(part, skip_special_tokens=False) for part in parts]
    return found


@pytest.mark.parametrize("packing", ["auto", "one", "cut"])
def test_every_token_of_an_answer_is_a_label_once_and_no_other(
    tmp_path: Path, packing: Any
) -> None:
    config = replace(write_rows(tmp_path / "a.jsonl"), packing=packing)
    examples = [each for (each,) in read_examples(config, TEMPLATE, lambda name, fault: None)]
    wanted: Counter[tuple[int, ...]] = Counter()
    for example in examples:
        # What a label follows, in its conversation.
        for at in np.flatnonzero(example.mask):
            wanted[tuple(example.ids[: at + 1].tolist())] += 1
    stored = prepared(config, tmp_path)
    assert stored.train.num_trained_tokens == wanted.total()
    if packing == "cut":  # a piece does not know how its conversation began
        wanted = Counter(key[-2:] for key in wanted.elements())
    found: Counter[tuple[int, ...]] = Counter()
    windows = windows_of(stored)
    for index in range(len(windows)):
        inputs, labels, starts, _ = windows.get(index)
        assert starts is not None and starts[0] == 0
        for at in np.flatnonzero(labels != IGNORE_INDEX):
            begin = at if packing == "cut" else starts[starts <= at].max()
            found[(*inputs[begin : at + 1].tolist(), int(labels[at]))] += 1
    assert found == wanted


def test_windows_hold_whole_conversations(tmp_path: Path) -> None:
    config = write_rows(tmp_path / "a.jsonl")
    whole = [
        TOKENIZER.backend.decode(example.ids, skip_special_tokens=False)
        for (example,) in read_examples(config, TEMPLATE, lambda name, fault: None)
    ]
    assert sorted(texts_of(windows_of(prepared(config, tmp_path)))) == sorted(whole)


def test_second_call_reads_the_cache_and_still_names_what_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_rows(tmp_path / "a.jsonl", 20, '{"messages": []}')
    first = prepared(config, tmp_path)
    assert first.skipped == (f"{tmp_path}/a.jsonl:21: no assistant turn",)
    monkeypatch.delattr(conversations, "read_examples")
    assert prepared(config, tmp_path) == first
    with pytest.raises(UserError, match="no assistant turn"):
        prepared(replace(config, max_corrupt=0), tmp_path)


def test_answers_that_do_not_fit_are_refused_beyond_a_limit(tmp_path: Path) -> None:
    config = replace(write_rows(tmp_path / "a.jsonl", 20), seq_len=12, max_corrupt=1)
    with pytest.raises(UserError, match="2 records of the data cannot be trained on") as caught:
        prepared(config, tmp_path)
    assert f"{tmp_path}/a.jsonl:2: its answers do not fit into data.seq_len (" in caught.value.what
    assert "write a larger data.seq_len" in caught.value.fix


def test_the_key_follows_all_that_decides_the_tokens(tmp_path: Path) -> None:
    config = write_rows(tmp_path / "a.jsonl", 4)

    def key(template: ChatTemplate = TEMPLATE, **changes: Any) -> str:
        changed = replace(config, **changes)
        return conversations.conversations_directory(changed, TOKENIZER, template, tmp_path).name

    same = {key(), key(packing="best_fit"), key(shuffle=False), key(max_corrupt=0)}
    others = {
        *(key(ChatTemplate(TOKENIZER, MARKED)), key(format="chat"), key(seq_len=64)),
        *(key(packing="one"), key(eval_fraction=0.5)),
    }
    assert len(same) == 1 and len(others) == 5 and not same & others
    write_rows(tmp_path / "a.jsonl", 5)
    assert key() not in same


@pytest.mark.parametrize("file", ["tokens.bin", "mask.bin", "train-pieces.bin", "train-firsts.bin"])
def test_damage_is_found(tmp_path: Path, file: str) -> None:
    config = write_rows(tmp_path / "a.jsonl", 4)
    stored = prepared(config, tmp_path)
    path = stored.tokens.path.with_name(file)
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match="is damaged"):
        prepared(config, tmp_path)
    assert prepared(config, tmp_path, verify=False) == stored
    path.write_bytes(whole + b"x")
    with pytest.raises(UserError, match="is damaged"):
        prepared(config, tmp_path, verify=False)


def test_conversations_are_held_out_whole_whatever_the_template_and_the_window(
    tmp_path: Path,
) -> None:
    config = replace(write_rows(tmp_path / "a.jsonl", 100), eval_fraction=0.2)
    stored = prepared(config, tmp_path)
    train, held_out = (set(texts_of(windows_of(stored, name))) for name in ("train", "eval"))
    assert len(train) + len(held_out) == 100 and 10 < len(held_out) < 30
    wider = prepared(replace(config, packing="one"), tmp_path)
    assert set(texts_of(windows_of(wider, "eval"))) == held_out
    assert stored.digest(stored.train) != wider.digest(wider.train)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_both_splits_get_a_conversation(tmp_path: Path, fraction: float) -> None:
    config = replace(write_rows(tmp_path / "a.jsonl", 2), eval_fraction=fraction)
    stored = prepared(config, tmp_path)
    assert [split.num_conversations for split in stored.splits.values()] == [1, 1]
    single = replace(write_rows(tmp_path / "b.jsonl", 1), eval_fraction=fraction)
    with pytest.raises(UserError, match="a single document cannot be split"):
        prepared(single, tmp_path)


def test_progress_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.data.progress.EVERY_S", 0.0)
    said: list[str] = []
    prepared(write_rows(tmp_path / "a.jsonl", 3), tmp_path, say=said.append)
    assert len(said) == 3 and said[2].startswith("tokenising: 3 conversations, ")
