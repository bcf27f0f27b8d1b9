"""Rows with several keys, as conversations have them, from files of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.config.schema import DataConfig
from shardwise.data.conversation import ROW_KEYS
from shardwise.data.dataset import dataset_path, dataset_rows
from shardwise.data.json_files import Named, read_records
from shardwise.data.parquet import read_rows
from shardwise.data.paths import find_files
from shardwise.units import MIB

# Far more than the context of any model. Rendering takes several copies of it.
MAX_ROW_BYTES = 32 * MIB


def read_conversation_rows(config: DataConfig) -> Iterator[Named]:
    """All rows of the source in a fixed order."""
    match config.source:
        case "jsonl":
            for path in find_files(config):
                yield from read_records(path, MAX_ROW_BYTES)
        case "parquet":
            for path in find_files(config):
                yield from _named(str(path), read_rows(path, ROW_KEYS))
        case "datasets":
            yield from _named(dataset_path(config), dataset_rows(config))
        case _:
            raise ValueError(f"{config.source} has no rows")


def _named(path: str, rows: Iterable[dict[str, Any]]) -> Iterator[Named]:
    for number, row in enumerate(rows):
        yield f"{path}:{number}", without_nulls(row)


def without_nulls(value: Any) -> Any:
    """The same without keys that have no value. A table gives every object the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
