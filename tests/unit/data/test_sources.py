from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.paths import STDLIB_MAX_BYTES
from shardwise.data.sources import Document, describe_source, read_documents
from shardwise.errors import UserError


def documents_of(config: DataConfig, limit: int = 0) -> tuple[list[Document], tuple[str, ...]]:
    faults = FaultBudget(limit)
    return list(read_documents(config, faults)), faults.named


def test_stdlib_is_bounded_and_free_of_tests() -> None:
    documents, skipped = documents_of(DataConfig(source="stdlib"))
    size = sum(len(document.text.encode()) for document in documents)
    assert STDLIB_MAX_BYTES / 4 < size <= STDLIB_MAX_BYTES
    assert skipped == ()
    assert not any(document.id.startswith(("test/", "site-packages/")) for document in documents)
    assert [document.id for document in documents] == [
        document.id for document in documents_of(DataConfig(source="stdlib"))[0]
    ]


def test_text_reads_files_directories_and_globs_once_each(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "sub" / "a.md").write_text("ay")
    (tmp_path / "sub" / "empty.txt").write_text("")
    (tmp_path / "sub" / "image.png").write_text("no text")
    (tmp_path / "sub" / ".hidden" / "c.txt").write_text("unseen")
    (tmp_path / "named.log").write_text("any suffix")
    paths = [str(tmp_path), f"{tmp_path}/*.txt", f"{tmp_path}/named.log"]
    documents, skipped = documents_of(DataConfig(source="text", path=paths))
    assert [document.text for document in documents] == ["bee", "any suffix", "ay"]
    assert skipped == ()


def test_pattern_without_match_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("there")
    paths = [str(tmp_path), f"{tmp_path}/*.nothing"]
    with pytest.raises(UserError, match=r"nothing' matches no file"):
        documents_of(DataConfig(source="text", path=paths))


@pytest.mark.parametrize("source", ["text", "jsonl", "datasets"])
def test_path_is_needed(source: str) -> None:
    with pytest.raises(UserError, match=r"no data\.path"):
        documents_of(DataConfig(source=source))


def test_invalid_utf8_text_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo\n\xff\n")
    (tmp_path / "good.txt").write_text("good")
    config = DataConfig(source="text", path=str(tmp_path))
    documents, skipped = documents_of(config, limit=1)
    assert [document.text for document in documents] == ["good"]
    assert skipped == (f"{tmp_path}/bad.txt:3: invalid UTF-8",)


BAD_LINES = {
    b'{"text": "cut': "invalid JSON",
    b'["a list"]': "not an object but list",
    b'{"other": "key"}': "no key 'text'",
    b'{"text": 7}': "'text' is not a string but int",
    b'{"text": null}': "'text' is not a string but NoneType",
    b'{"text": ""}': "'text' is empty",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "\\ud800"}': "lone surrogate",
    b"[" * 100_000: "invalid JSON",
}


def test_jsonl_skips_and_names_every_kind_of_corrupt_record(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [b'\xef\xbb\xbf{"text": "first"}', b"", b"  ", *BAD_LINES, b'{"text": "last"}']
    path.write_bytes(b"\n".join(lines))
    documents, skipped = documents_of(DataConfig(source="jsonl", path=str(path)), len(BAD_LINES))
    assert [document.text for document in documents] == ["first", "last"]
    assert len(skipped) == len(BAD_LINES)
    for number, (fault, reason) in enumerate(zip(skipped, BAD_LINES.values(), strict=True), 4):
        assert fault.startswith(f"{path}:{number}: ")
        assert reason in fault


def test_one_corrupt_record_too_many_is_refused_and_lists_all(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"no": 1}\n[]\n{"text": 3}\n')
    with pytest.raises(UserError) as caught:
        documents_of(DataConfig(source="jsonl", path=str(path)), limit=1)
    assert f"{path}:2: " in caught.value.what
    assert f"{path}:3: " in caught.value.what
    assert "data.max_corrupt allows 1" in caught.value.why


def test_jsonl_reads_another_field(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    documents, _ = documents_of(DataConfig(source="jsonl", path=str(tmp_path), field="body"))
    assert [document.text for document in documents] == ["yes"]


def test_saved_dataset_and_its_faults(tmp_path: Path) -> None:
    import datasets

    rows = {"text": ["one", "", None, "two"], "other": [1, 2, 3, 4]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "plain")
    config = DataConfig(source="datasets", path=str(tmp_path / "plain"))
    documents, skipped = documents_of(config, limit=1)
    assert [document.text for document in documents] == ["one", "two"]
    assert skipped == (f"{tmp_path}/plain:2: 'text' is not a string but NoneType",)
    assert describe_source(config)["files"]


def test_saved_dataset_dict_gives_one_split(tmp_path: Path) -> None:
    import datasets

    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    path = str(tmp_path / "splits")
    documents, _ = documents_of(DataConfig(source="datasets", path=path, split="test"))
    assert [document.text for document in documents] == ["test"]
    with pytest.raises(UserError, match="no split 'dev'"):
        documents_of(DataConfig(source="datasets", path=path, split="dev"))
    with pytest.raises(UserError, match="no column 'body'"):
        documents_of(DataConfig(source="datasets", path=path, field="body"))


def test_dataset_that_cannot_be_loaded_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        documents_of(DataConfig(source="datasets", path=str(tmp_path)))
