"""A fingerprint that tells the data of one node from that of another before it is tokenised."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

from shardwise.config.mixed_datasets import read_datasets
from shardwise.config.schema import DataConfig
from shardwise.data.dataset import open_dataset
from shardwise.data.paths import find_files
from shardwise.facts.tokenizer_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILES
from shardwise.files import read_bytes, sampled_digest

# Rows of a dataset that are hashed, from both ends and the middle: on another node they may lie in
# other files.
_ROWS = 16
# Besides those that make a directory a tokenizer's.
_TOKENIZER_FILES = (*TOKENIZER_FILES, "special_tokens_map.json", "merges.txt")


def fingerprint_data(config: DataConfig) -> dict[str, Any]:
    """Counts and hashes by name. Paths do not count: copies may lie elsewhere on each node."""
    return {
        f"{name} in {each.name}" if each.name else name: value
        for each in read_datasets(config)
        for name, value in _of_one(each.data).items()
    }


def _of_one(config: DataConfig) -> dict[str, Any]:
    match config.source:
        case "synthetic":
            return {}
        case "datasets":
            return _of_rows(open_dataset(config))
        case "stdlib":
            # Finding its files takes longer than all the rest. Its tokens are compared later.
            return {"Python's standard library": platform.python_version()}
        case "text" | "jsonl" | "parquet":
            return _of_files(find_files(config))


def fingerprint_tokenizer(directory: Path) -> str:
    """A hash of the files that a tokenizer is read from."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            digest.update(name.encode() + read_bytes(directory / name, MAX_TOKENIZER_BYTES))
    return digest.hexdigest()


def _of_files(files: list[Path]) -> dict[str, Any]:
    return {
        "files of data.path": len(files),
        "bytes of data.path": sum(path.stat().st_size for path in files),
        "samples of data.path": sampled_digest(files),
    }


def _of_rows(dataset: Any) -> dict[str, Any]:
    size = len(dataset)
    starts = (0, max(0, size - _ROWS) // 2, max(0, size - _ROWS))
    rows = sorted({row for start in starts for row in range(start, min(start + _ROWS, size))})
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(dataset[row]).encode(errors="replace"))
    return {"rows of data.path": size, "samples of data.path": digest.hexdigest()}
