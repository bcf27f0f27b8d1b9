"""All documents as one row of tokens on disk, written once for each content and reused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.schema import DataConfig
from shardwise.data.arrays import smallest_dtype
from shardwise.data.bad_records import FaultBudget
from shardwise.data.cache import (
    DRAW_RANGE,
    build_directory,
    damaged,
    draw_of,
    key_of,
    one_document,
    validate_content,
    validate_sizes,
    write_index,
)
from shardwise.data.progress import Say, TokenProgress, silent
from shardwise.data.sources import Document, describe_source, read_documents
from shardwise.data.tokenizer import TokenIds, Tokenizer
from shardwise.data.tokens import TokenFile, TokenWriter
from shardwise.errors import UserError
from shardwise.files import read_json

# This is part of every key. Raise it when the same documents would be written differently.
FORMAT = 4

# A fast tokenizer needs several documents to keep its threads busy; more only take memory.
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class PackedData:
    """The tokens of a source, split into what is trained on and what is held out."""

    train: TokenFile
    eval: TokenFile | None
    skipped: tuple[str, ...]

    @property
    def files(self) -> list[TokenFile]:
        """The file of each split that there is."""
        return [file for file in (self.train, self.eval) if file is not None]

    @property
    def num_documents(self) -> int:
        """Documents of both splits."""
        return sum(file.num_documents for file in self.files)


@dataclass(frozen=True, slots=True)
class _Written:
    """One pass over the documents: the files, the faults, and the range of the draws."""

    train: TokenFile
    eval: TokenFile
    skipped: tuple[str, ...]
    lowest_draw: int
    highest_draw: int


def prepare_tokens(
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_root: Path,
    *,
    verify: bool = True,
    say: Say = silent,
) -> PackedData:
    """The source's tokens, from the cache where the same content was packed before.

    Tokens from the cache are hashed, unless another process does that (`verify`).
    """
    directory = cache_root / f"tokens-{content_key(config, tokenizer, cache_root)}"

    def write(aside: Path) -> None:
        written = _write_split(config, tokenizer, aside, say)
        write_index(aside, _index_of(written, keep_eval=config.eval_fraction > 0))

    is_new = build_directory(directory, write)
    packed = _read_index(directory)
    if verify and not is_new:
        validate_content(packed.files)
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
    return key_of(content)


def _write_split(config: DataConfig, tokenizer: Tokenizer, directory: Path, say: Say) -> _Written:
    held_out_below = round(config.eval_fraction * DRAW_RANGE)
    written = _write_documents(config, tokenizer, directory, held_out_below, say)
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
        raise one_document(config.eval_fraction)
    # With few documents one side may be empty by chance. It then gets the document whose draw is
    # nearest, which takes a second pass over few documents.
    if written.eval.num_documents == 0:
        return _write_documents(config, tokenizer, directory, written.lowest_draw + 1, say)
    if written.train.num_documents == 0:
        return _write_documents(config, tokenizer, directory, written.highest_draw, say)
    return written


def _write_documents(
    config: DataConfig, tokenizer: Tokenizer, directory: Path, held_out_below: int, say: Say
) -> _Written:
    progress = TokenProgress(say, "documents")
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
            progress.add(len(ids))
    return _Written(train.written(), held_out.written(), faults.named, lowest, highest)


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


def _index_of(written: _Written, *, keep_eval: bool) -> dict[str, Any]:
    return {
        "dtype": written.train.dtype,
        "train": _described(written.train),
        "eval": _described(written.eval) if keep_eval else None,
        "skipped": written.skipped,
    }


def _described(file: TokenFile) -> dict[str, int | str]:
    return {
        "num_tokens": file.num_tokens,
        "num_documents": file.num_documents,
        "sha256": file.sha256,
    }


def _read_index(directory: Path) -> PackedData:
    try:
        index = read_json(directory / "index.json")

        def file_of(name: str) -> TokenFile:
            found, path = index[name], directory / f"{name}.bin"
            sizes = found["num_tokens"], found["sha256"], found["num_documents"]
            return TokenFile(path, index["dtype"], *sizes)

        held_out = file_of("eval") if index["eval"] else None
        packed = PackedData(file_of("train"), held_out, tuple(index["skipped"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(directory, f"index.json: {error}") from error
    validate_sizes(packed.files)
    return packed
