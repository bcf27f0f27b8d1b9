"""All documents as one row of tokens on disk, written once for each content and reused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from uuid import uuid4

from shardwise.config.schema import DataConfig
from shardwise.data.content import hash_of
from shardwise.data.faults import FaultBudget
from shardwise.data.sources import Document, describe_source, read_documents
from shardwise.data.tokenizer import TokenIds, Tokenizer
from shardwise.data.tokens import TokenFile, TokenWriter, smallest_dtype
from shardwise.errors import UserError
from shardwise.files import read_json

# This is part of every key. Raise it when the same documents would be written differently.
FORMAT = 4

# A fast tokenizer needs several documents to keep its threads busy; more only take memory.
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1_000_000

DRAW_RANGE = 2**64
ABANDONED_AFTER_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class PackedData:
    """The tokens of a source, split into what is trained on and what is held out."""

    train: TokenFile
    eval: TokenFile | None
    skipped: tuple[str, ...]

    @property
    def num_documents(self) -> int:
        """Documents of both splits."""
        return self.train.num_documents + (self.eval.num_documents if self.eval else 0)


@dataclass(frozen=True, slots=True)
class _Written:
    """One pass over the documents: the files, the faults, and the range of the draws."""

    train: TokenFile
    eval: TokenFile
    skipped: tuple[str, ...]
    lowest_draw: int
    highest_draw: int


def prepare_tokens(
    config: DataConfig, tokenizer: Tokenizer, cache_root: Path, *, verify: bool = True
) -> PackedData:
    """The source's tokens, from the cache where the same content was packed before.

    Tokens from the cache are hashed, unless another process does that (`verify`).
    """
    directory = cache_root / f"tokens-{content_key(config, tokenizer, cache_root)}"
    is_new = not directory.exists()
    if is_new:
        _build(config, tokenizer, directory)
    packed = _read_index(directory)
    if verify and not is_new:
        _validate_content(packed)
    # The budget is no part of the key: a stricter run must refuse what a laxer one has packed.
    FaultBudget(config.max_corrupt).skip_all(packed.skipped)
    return packed


def content_key(config: DataConfig, tokenizer: Tokenizer, cache_root: Path | None = None) -> str:
    """A hash of everything that decides the tokens and their split."""
    content = {
        "format": FORMAT,
        "source": describe_source(config, cache_root),
        "tokenizer": tokenizer.identity,
        "eos_id": tokenizer.eos_id,
        "vocab_size": tokenizer.vocab_size,
        "eval_fraction": config.eval_fraction,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _build(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> None:
    """Write aside and rename, so that a killed run leaves nothing under the final name."""
    aside = directory.with_name(f".{directory.name}-{uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        _write_index(aside, _write_split(config, tokenizer, aside), config.eval_fraction > 0)
        _publish(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _remove_abandoned(directory.parent)


def _publish(aside: Path, directory: Path) -> None:
    try:
        os.rename(aside, directory)
    except OSError:
        # Another process was first; its content has the same key and so is the same.
        if not directory.is_dir():
            raise


def _remove_abandoned(cache_root: Path) -> None:
    """Delete what killed runs left aside; a living writer touches its files all the time."""
    oldest_alive = time.time() - ABANDONED_AFTER_S
    for aside in cache_root.glob(".tokens-*"):
        try:
            newest = max(path.stat().st_mtime for path in (aside, *aside.iterdir()))
        except FileNotFoundError:
            continue  # its owner has just published or removed it
        if newest < oldest_alive:
            shutil.rmtree(aside, ignore_errors=True)


def _write_split(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> _Written:
    held_out_below = round(config.eval_fraction * DRAW_RANGE)
    written = _write_documents(config, tokenizer, directory, held_out_below)
    num_documents = written.train.num_documents + written.eval.num_documents
    if num_documents == 0:
        raise UserError(
            f"data.source {config.source} has no text",
            why="every document is empty or was skipped",
            fix="write data.path=FILES that hold text, and for jsonl data.field=KEY of the text",
        )
    if config.eval_fraction == 0:
        return written
    if written.lowest_draw == written.highest_draw:
        raise UserError(
            "a single document cannot be split for evaluation",
            why=f"data.eval_fraction {config.eval_fraction} holds out whole documents, and those "
            "with the same text stay together",
            fix="write data.eval_fraction=0, or give the text as several documents",
        )
    # With few documents one side may be empty by chance. It then gets the document whose draw is
    # nearest, which takes a second pass over few documents.
    if written.eval.num_documents == 0:
        return _write_documents(config, tokenizer, directory, written.lowest_draw + 1)
    if written.train.num_documents == 0:
        return _write_documents(config, tokenizer, directory, written.highest_draw)
    return written


def _write_documents(
    config: DataConfig, tokenizer: Tokenizer, directory: Path, held_out_below: int
) -> _Written:
    faults = FaultBudget(config.max_corrupt)
    dtype = smallest_dtype(tokenizer.vocab_size)
    lowest, highest = DRAW_RANGE, -1
    with (
        TokenWriter(directory / "train.bin", dtype) as train,
        TokenWriter(directory / "eval.bin", dtype) as held_out,
    ):
        for text, ids in _encoded(read_documents(config, faults), tokenizer):
            if len(ids) == 0:
                continue  # white space only, for tokenizers that drop it
            draw = draw_of(text)
            lowest, highest = min(lowest, draw), max(highest, draw)
            writer = held_out if draw < held_out_below else train
            writer.append(ids, tokenizer.eos_id)
    return _Written(train.written(), held_out.written(), faults.named, lowest, highest)


def draw_of(text: str) -> int:
    """A number that the text alone decides.

    Neither the file's place, its order nor a seed changes the split, so a run that resumes where
    the files lie elsewhere reads what it would have read.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[str, TokenIds]]:
    for batch in _batched(documents):
        encoded = tokenizer.encode_batch([document.text for document in batch])
        yield from zip((document.text for document in batch), encoded, strict=True)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _write_index(directory: Path, written: _Written, keep_eval: bool) -> None:
    index = {
        "dtype": written.train.dtype,
        "train": _described(written.train),
        "eval": _described(written.eval) if keep_eval else None,
        "skipped": written.skipped,
    }
    with (directory / "index.json").open("w") as stream:
        json.dump(index, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _described(file: TokenFile) -> dict[str, int | str]:
    return {
        "num_tokens": file.num_tokens,
        "num_documents": file.num_documents,
        "sha256": file.sha256,
    }


def _read_index(directory: Path) -> PackedData:
    try:
        index = read_json(directory / "index.json")
        train = TokenFile(directory / "train.bin", index["dtype"], **index["train"])
        held_out = index["eval"] and TokenFile(
            directory / "eval.bin", index["dtype"], **index["eval"]
        )
        packed = PackedData(train, held_out, tuple(index["skipped"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, f"index.json: {error}") from error
    for file in (packed.train, packed.eval):
        if file is not None and not file.is_whole():
            raise _damaged(directory, f"{file.path.name} is not {file.num_tokens} tokens long")
    return packed


def _validate_content(packed: PackedData) -> None:
    """Raise where the tokens are not those that were written."""
    for file in (packed.train, packed.eval):
        if file is not None and hash_of(file.path) != file.sha256:
            raise _damaged(file.path.parent, f"{file.path.name}: its content has changed")


def _damaged(directory: Path, why: str) -> UserError:
    return UserError(
        f"the token cache {directory} is damaged",
        why=why,
        fix=f"delete it, and the next run makes it again: rm -r {quote(str(directory))}",
    )
