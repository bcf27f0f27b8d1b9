"""Files of conversations, counted: good rows, rows that are left out, and cut ones."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CALL, GEMMA, MARKED, make_backend

from shardwise.config.schema import DataConfig
from shardwise.data import rows
from shardwise.data.examples import read_examples
from shardwise.data.has_text import validate_conversations, validate_text
from shardwise.data.survey import SkippedRows, survey_examples
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import HubTokenizer
from shardwise.errors import UserError

TOKENIZER = HubTokenizer("made", make_backend())
TEMPLATE = ChatTemplate(TOKENIZER, MARKED)
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "world"},
            {"role": "assistant", "content": "c", "reasoning_content": "r"},
        ]
    },
]


def lines_of(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def data_of(path: Path, source: str = "jsonl", **more: Any) -> DataConfig:
    settings = {"format": "auto", "seq_len": 256, **more}
    return DataConfig(source=source, path=str(path), **settings)  # type: ignore[arg-type]


def write_dataset(directory: Path) -> None:
    import datasets

    datasets.Dataset.from_list([row | {"id": 1} for row in ROWS]).save_to_disk(str(directory))


def test_files_of_every_kind_give_the_same_examples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(*ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(*ROWS)))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_dataset(tmp_path / "saved")
    skipped = SkippedRows()
    found = [
        [
            (example.ids.tolist(), example.mask.tolist())
            for (example,) in read_examples(
                data_of(tmp_path / name, source), TEMPLATE, skipped.skip
            )
        ]
        for name, source in (
            *(("a.jsonl", "jsonl"), ("a.jsonl.gz", "jsonl")),
            *(("a.parquet", "parquet"), ("saved", "datasets")),
        )
    ]
    assert len(found[0]) == 2 and not skipped.counts
    assert found[1:] == found[:1] * 3


def test_bad_rows_are_counted_and_named_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 4096)
    good, twice = ROWS[0], {"role": "system", "content": "s"}
    user, answer = good["messages"]
    path = tmp_path / "chat.jsonl"
    path.write_bytes(
        lines_of(good, {"messages": [{"content": "a"}, answer]})
        + lines_of({"messages": [twice, twice, user, answer]}, {"messages": [user]})
        + b'{"messages": "\xff"}\n\n{"messages": \n[1]\n'
        + lines_of({"messages": [user, user, answer]}, {"messages": [answer, user, answer]})
        + lines_of({"messages": [user | {"content": "x" * 5000}, answer]})
        + lines_of({"messages": [user, answer | {"content": "answer " * 300}]})
        + lines_of({"messages": [user | {"content": "question " * 300}, answer]}, good)
    )
    gemma = ChatTemplate(TOKENIZER, GEMMA)
    survey = survey_examples(data_of(path), gemma, num_samples=1)
    assert survey.skipped.counts == {
        "a turn has no role": 1,
        "two system turns": 1,
        "no assistant turn": 1,
        "invalid UTF-8": 1,
        "invalid JSON": 1,
        "not an object but list": 1,
        "the chat template refuses it": 1,
        "an assistant turn comes first": 1,
        "it is longer than 4.0 KiB": 1,
        "its answers do not fit into data.seq_len": 1,
    }
    assert survey.skipped.named["a turn has no role"] == [f"{path}:2: a turn has no role"]
    (refused,) = survey.skipped.named["the chat template refuses it"]
    assert refused.startswith(f"{path}:9: ") and "roles must alternate" in refused
    assert (survey.num_conversations, survey.num_rows, survey.num_cut) == (3, 13, 1)
    assert max(survey.lengths) <= 256
    assert survey.num_windows == 2 and survey.padding_share(256) == 1 - survey.num_tokens / 512
    assert [example.document for (example,) in survey.samples] == [f"{path}:1"]
    trained = len(TOKENIZER.encode("b<end_of_turn>\n"))
    assert survey.num_trained_tokens == 3 * trained < survey.num_tokens


def test_only_the_first_rows_of_a_reason_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(*ROWS, *[{"messages": []}] * 9))
    survey = survey_examples(data_of(tmp_path), TEMPLATE, num_samples=0)
    assert survey.skipped.counts == {"no assistant turn": 9}
    assert len(survey.skipped.named["no assistant turn"]) == 3
    assert survey_examples(data_of(tmp_path), TEMPLATE, num_samples=0, max_rows=4).num_rows == 4


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "it has no rows"), (lines_of({"text": "a"}), ":1: it has no messages, or ")],
)
def test_nothing_to_train_on_is_an_error(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="has no conversation to train on") as caught:
        survey_examples(data_of(tmp_path), TEMPLATE, num_samples=1)
    assert why in caught.value.why


def test_tables_without_a_known_column_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError) as caught:
        survey_examples(data_of(tmp_path, "parquet"), TEMPLATE, num_samples=1)
    assert "a.parquet:1: it has no messages" in caught.value.why


def test_the_first_conversation_is_looked_at_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of({"messages": []}, *ROWS))
    template = tmp_path / "template.jinja"
    template.write_text(MARKED)
    config = data_of(tmp_path, chat_template=str(template))
    validate_text(config)
    validate_conversations(config, TOKENIZER)
    with pytest.raises(UserError, match="1 records of the data cannot be trained on"):
        validate_conversations(replace(config, max_corrupt=0), TOKENIZER)
    (tmp_path / "a.jsonl").write_bytes(lines_of({"messages": []}))
    with pytest.raises(UserError, match="has no conversation to train on") as caught:
        validate_conversations(config, TOKENIZER)
    assert "a.jsonl:1: no assistant turn" in caught.value.why
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"the files of data\.path are empty"):
        validate_text(config)


def test_where_no_answer_fits_a_longer_sequence_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(*ROWS))
    short = data_of(tmp_path / "a.jsonl", seq_len=4)
    with pytest.raises(UserError, match="has no conversation to train on") as caught:
        survey_examples(short, TEMPLATE, num_samples=0)
    assert "its answers do not fit into data.seq_len" in caught.value.why
    assert caught.value.fix == "write a larger data.seq_len, such as data.seq_len=16"
