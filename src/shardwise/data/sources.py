"""Where documents come from: one reader for each source, and a description of what it would
read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.compressed import open_bytes
from shardwise.data.content import hashes_of
from shardwise.data.dataset import dataset_files, dataset_path, dataset_rows, open_dataset
from shardwise.data.json_files import Record, read_records
from shardwise.data.parquet import read_column
from shardwise.data.paths import find_files, stdlib_files, stdlib_root
from shardwise.data.records import CorruptRecord, valid_text
from shardwise.errors import UserError
from shardwise.units import GIB, MIB, format_bytes

MAX_TEXT_BYTES = 2 * GIB
_MAX_RECORD_BYTES = 256 * MIB
_PIECE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and a name for it that does not change between runs."""

    id: str
    text: str


class MissingKey(CorruptRecord):
    """A record without the key of `data.field`; it names those that are there."""

    def __init__(self, key: str, record: dict[str, Any]) -> None:
        super().__init__(f"no key {key!r}; its keys are {', '.join(map(repr, record)) or 'none'}")
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        longest = max(texts, key=lambda name: len(texts[name]), default="KEY")
        self.fix = f"set data.field to the key that holds the text, such as data.field={longest}"


def read_documents(config: DataConfig, faults: FaultBudget) -> Iterator[Document]:
    """All documents of the source in a fixed order; unreadable ones go to `faults`."""
    match config.source:
        case "stdlib":
            root = stdlib_root()
            return _read_texts(
                ((path.relative_to(root).as_posix(), path) for path in stdlib_files()), faults
            )
        case "text":
            return _read_texts(((str(path), path) for path in find_files(config)), faults)
        case "jsonl":
            return _read_jsonl(find_files(config), config.field, faults)
        case "parquet":
            return _read_parquet(find_files(config), config.field, faults)
        case "datasets":
            return _read_dataset(config, faults)
        case "synthetic":
            raise ValueError("synthetic data has no documents")


def describe_source(config: DataConfig, cache_root: Path | None = None) -> dict[str, Any]:
    """Everything that decides the documents. Equal descriptions mean the same text, byte by
    byte."""
    description: dict[str, Any] = {"source": config.source}
    match config.source:
        case "stdlib":
            files: Sequence[Path] = stdlib_files()
        case "text":
            files = find_files(config)
        case "jsonl" | "parquet":
            files = find_files(config)
            description |= {"field": config.field}
        case "datasets":
            files = dataset_files(open_dataset(config))
            description |= {"field": config.field, "path": dataset_path(config)}
            description |= {"name": config.name, "split": config.split}
        case "synthetic":
            files = []
    hashes = hashes_of(files, cache_root)
    return description | {"files": list(zip(map(str, files), hashes, strict=True))}


def _read_texts(files: Iterable[tuple[str, Path]], faults: FaultBudget) -> Iterator[Document]:
    for name, path in files:
        with open_bytes(path) as stream:
            raw = b"".join(_pieces(stream, path))
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            faults.skip(f"{name}:{line}: invalid UTF-8")
            continue
        # An empty file, such as an __init__.py, is no fault. It holds no document.
        if text:
            yield Document(name, text)


def _pieces(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """All of a text file in pieces, up to the limit of one document, because a few compressed
    bytes can become many."""
    num_bytes = 0
    while piece := stream.read(_PIECE_BYTES):
        num_bytes += len(piece)
        if num_bytes > MAX_TEXT_BYTES:
            raise too_large(path)
        yield piece


def too_large(path: Path) -> UserError:
    """The error for a text file that is too large to be one document."""
    return UserError(
        f"{path} has more than {format_bytes(MAX_TEXT_BYTES)} of text",
        why="a text file is one document, and a document is tokenised whole",
        fix="split it, or make its parts lines of JSON: data.source=jsonl data.path=FILES",
    )


def _read_jsonl(files: Iterable[Path], field: str, faults: FaultBudget) -> Iterator[Document]:
    for path in files:
        for name, record in read_records(path, _MAX_RECORD_BYTES):
            try:
                yield Document(name, _text_of(record, field))
            except CorruptRecord as reason:
                faults.skip(f"{name}: {reason}", reason.fix)


def _text_of(record: Record, field: str) -> str:
    if isinstance(record, CorruptRecord):
        raise record
    if field not in record:
        raise MissingKey(field, record)
    if record[field] == "":
        raise CorruptRecord(f"{field!r} is empty")
    return valid_text(record[field], field)


def _read_parquet(files: Iterable[Path], field: str, faults: FaultBudget) -> Iterator[Document]:
    for path in files:
        yield from _read_rows(str(path), read_column(path, field), field, faults)


def _read_dataset(config: DataConfig, faults: FaultBudget) -> Iterator[Document]:
    values = (row[config.field] for row in dataset_rows(config))
    return _read_rows(dataset_path(config), values, config.field, faults)


def _read_rows(
    path: str, values: Iterable[object], field: str, faults: FaultBudget
) -> Iterator[Document]:
    for number, value in enumerate(values):
        name = f"{path}:{number}"
        # Line-wise datasets (wikitext) keep blank lines as empty rows: no fault, no document.
        if value == "":
            continue
        try:
            yield Document(name, valid_text(value, field))
        except CorruptRecord as reason:
            faults.skip(f"{name}: {reason}")
