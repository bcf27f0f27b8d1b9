"""The same records as JSON lines, compressed and in Parquet; and files that are none of these."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.config.load import load_config
from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.sources import describe_source, read_documents
from shardwise.errors import UserError

TEXTS = [f"record {n}: " + "words " * n for n in range(700)]
LINES = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)).encode()


def zst(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def write_parquet(file: Path) -> None:
    table = pa.table({"text": TEXTS, "id": range(len(TEXTS)), "more": TEXTS})
    pq.write_table(table, file, row_group_size=300, write_page_checksum=True)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda file: file.write_bytes(LINES),
    "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(LINES)),
    # Two members or frames, as parallel compressors and `cat` make them.
    "b.jsonl.gz": lambda file: file.write_bytes(
        gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:])
    ),
    "a.jsonl.zst": lambda file: file.write_bytes(zst(LINES)),
    "b.ndjson.zst": lambda file: file.write_bytes(zst(LINES[:5000]) + zst(LINES[5000:])),
    "a.parquet": write_parquet,
    "a.pq": write_parquet,
}


def data_of(text: str | Path) -> DataConfig:
    """What `data: TEXT` means."""
    return load_config(None, [f"data={text}"]).data


def texts_of(config: DataConfig, limit: int = 0) -> list[str]:
    return [document.text for document in read_documents(config, FaultBudget(limit))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_holds_the_same_records(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    config = data_of(tmp_path / name)
    assert texts_of(config) == TEXTS
    assert len(describe_source(config)["files"]) == 1
    # A directory is searched for it too.
    assert texts_of(DataConfig(source=config.source, path=str(tmp_path))) == TEXTS


def test_compressed_text_is_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "b.md.zst").write_bytes(zst(b"two"))
    (tmp_path / "c.txt").write_text("three")
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(b"not searched for"))
    assert texts_of(data_of(tmp_path)) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(("a.jsonl.gz", "a.jsonl.zst", "a.parquet"), ("cut", "other", "empty")),
        # These hold checksums.
        *itertools.product(("a.jsonl.gz", "a.parquet"), ("flipped",)),
    ],
)
def test_a_damaged_file_is_an_error_by_its_name(tmp_path: Path, name: str, damage: str) -> None:
    WRITERS[name](tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    if damage == "flipped":
        place = len(data) // 20  # in Parquet, among the pages of the first column
        data[place : place + 40] = bytes(byte ^ 0xFF for byte in data[place : place + 40])
    broken = {"cut": data[: len(data) // 2], "other": b"no such format\n" * 9, "empty": b""}
    (tmp_path / name).write_bytes(bytes(broken.get(damage, data)))
    if damage == "empty" and name != "a.parquet":
        # Both formats take no bytes for no content: a file without a record.
        assert texts_of(data_of(tmp_path / name)) == []
        return
    with pytest.raises(UserError) as caught:
        texts_of(data_of(tmp_path / name), limit=10**6)
    assert str(tmp_path / name) in caught.value.what


def test_a_column_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column 'body'") as caught:
        texts_of(DataConfig(source="parquet", path=str(tmp_path), field="body"))
    assert caught.value.why == "its columns are text, id, more"
    with pytest.raises(UserError, match=r"'id' of .* holds int64, not text") as caught:
        texts_of(DataConfig(source="parquet", path=str(tmp_path), field="id"))
    assert caught.value.why == "its columns of text are text, more"


def test_rows_without_text_are_named_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    column = pa.array(["one", None, "", "two"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    faults = FaultBudget(1)
    found = [d.text for d in read_documents(data_of(tmp_path / "a.parquet"), faults)]
    assert found == ["one", "two"]
    assert faults.named == (f"{tmp_path / 'a.parquet'}:1: 'text' is not a string but NoneType",)
