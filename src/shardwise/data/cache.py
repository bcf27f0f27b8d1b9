"""Directories of tokens in the cache: written once for each content, and reused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote
from typing import Any
from uuid import uuid4

from shardwise.data.arrays import ArrayFile
from shardwise.data.content import hash_of
from shardwise.errors import UserError

ABANDONED_AFTER_S = 24 * 3600
DRAW_RANGE = 2**64


def key_of(content: dict[str, Any]) -> str:
    """A hash of everything that decides what is written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def build_directory(directory: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` fill the directory, unless it is there. Returns whether it was made now.

    It is written aside and renamed, so that a killed run leaves nothing under the final name.
    """
    if directory.exists():
        return False
    aside = directory.with_name(f".{directory.name}-{uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        write(aside)
        publish(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _remove_abandoned(directory.parent)
    return True


def publish(aside: Path, directory: Path) -> None:
    """Give a directory its final name."""
    try:
        os.rename(aside, directory)
    except OSError:
        # Another process was first; its content has the same key and so is the same.
        if not directory.is_dir():
            raise


def write_index(directory: Path, index: dict[str, Any]) -> None:
    """The file that says what the others hold, written last."""
    with (directory / "index.json").open("w") as stream:
        json.dump(index, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def validate_sizes(files: Iterable[ArrayFile]) -> None:
    """Raise where a file is longer or shorter than its index says."""
    for file in files:
        if not file.is_whole():
            what = f"{file.path.name} is not {file.length} numbers long"
            raise damaged(file.path.parent, what)


def validate_content(files: Iterable[ArrayFile]) -> None:
    """Raise where the numbers are not those that were written."""
    for file in files:
        if hash_of(file.path) != file.sha256:
            raise damaged(file.path.parent, f"{file.path.name}: its content has changed")


def damaged(directory: Path, why: str) -> UserError:
    """The error for a directory that does not hold what it should."""
    return UserError(
        f"the token cache {directory} is damaged",
        why=why,
        fix=f"delete it, and the next run makes it again: rm -r {quote(str(directory))}",
    )


def draw_of(text: str) -> int:
    """A number below DRAW_RANGE that the text alone decides.

    Neither the file's place, its order nor a seed changes the split, so a run that resumes where
    the files lie elsewhere reads what it would have read.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def one_document(fraction: float) -> UserError:
    """The error for data that cannot be split."""
    return UserError(
        "a single document cannot be split for evaluation",
        why=f"data.eval_fraction {fraction} holds out whole documents, and those with the same "
        "text stay together",
        fix="write data.eval_fraction=0, or give the text as several documents",
    )


def _remove_abandoned(cache_root: Path) -> None:
    """Delete what killed runs left aside; a living writer touches its files all the time."""
    oldest_alive = time.time() - ABANDONED_AFTER_S
    for aside in [*cache_root.glob(".tokens-*"), *cache_root.glob(".reference-*")]:
        try:
            newest = max(path.stat().st_mtime for path in (aside, *aside.iterdir()))
        except FileNotFoundError:
            continue  # its owner has just published or removed it
        if newest < oldest_alive:
            shutil.rmtree(aside, ignore_errors=True)
