"""Conversations as tokens on disk, and the windows that they are trained in.

All tokens are one row, with a mask beside it. A window names its pieces by their places in the
row, so documents need no token that ends them, and both splits share the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config.schema import DataConfig
from shardwise.data.arrays import ArrayFile, ArrayWriter, smallest_dtype
from shardwise.data.bad_records import FaultBudget
from shardwise.data.cache import (
    DRAW_RANGE,
    build_directory,
    damaged,
    key_of,
    one_document,
    validate_content,
    validate_sizes,
    write_index,
)
from shardwise.data.examples import nothing_left, read_examples
from shardwise.data.masking import Example
from shardwise.data.packing import pack, packing_of, split_pairs
from shardwise.data.progress import Say, TokenProgress, silent
from shardwise.data.sources import describe_source
from shardwise.data.template import ChatTemplate
from shardwise.data.tokenizer import Tokenizer
from shardwise.files import read_json

# This is part of every key. Raise it when the same conversations would be written differently.
FORMAT = 1
_NAMED_CUT = 3
_COMPARED = ("documents", "preferred")


@dataclass(frozen=True, slots=True)
class StoredSplit:
    """The windows of one split on disk."""

    pieces: ArrayFile
    firsts: ArrayFile
    num_conversations: int
    num_tokens: int
    num_trained_tokens: int

    @property
    def num_windows(self) -> int:
        """The sequences of one epoch."""
        return self.firsts.length - 1


@dataclass(frozen=True, slots=True)
class StoredConversations:
    """Both splits, the row of tokens that they share, and what happened to rows."""

    tokens: ArrayFile
    mask: ArrayFile
    train: StoredSplit
    eval: StoredSplit | None
    skipped: tuple[str, ...]
    num_cut: int
    cut: tuple[str, ...]
    """The first conversations that were cut to data.seq_len."""
    unit: str = "conversation"
    """What a row is called: a conversation, a pair or an answer."""
    documents: ArrayFile | None = None
    """The first token of each document, and at the end the number of tokens; only where documents
    are compared, and so are known by number."""
    preferred: ArrayFile | None = None
    """Whether a document is preferred, for each of these."""

    @property
    def splits(self) -> dict[str, StoredSplit]:
        """Those that there are, by name."""
        both = {"train": self.train, "eval": self.eval}
        return {name: split for name, split in both.items() if split is not None}

    def in_words(self, seq_len: int) -> list[str]:
        """What a run should say of them."""
        train = self.train
        room = train.num_windows * seq_len
        lines = [
            f"{train.num_conversations} {self.unit}s in {train.num_windows} sequences: "
            f"{train.num_trained_tokens / train.num_tokens:.1%} of their {train.num_tokens} tokens "
            f"are trained on, {1 - train.num_tokens / room:.1%} of the sequences is padding"
        ]
        if self.num_cut:
            lines.append(
                f"{self.num_cut} {self.unit}s are cut to data.seq_len {seq_len} and keep their "
                f"answers, such as {', '.join(self.cut)}"
            )
        return lines

    @property
    def counts(self) -> dict[str, int]:
        """What the record of a run keeps of them."""
        return {
            "conversations": self.train.num_conversations,
            "sequences": self.train.num_windows,
            "trained_tokens": self.train.num_trained_tokens,
            "cut": self.num_cut,
        }

    @property
    def files(self) -> list[ArrayFile]:
        """All files but the index."""
        windows = [file for split in self.splits.values() for file in (split.pieces, split.firsts)]
        compared = [file for file in (self.documents, self.preferred) if file is not None]
        return [self.tokens, self.mask, *windows, *compared]

    @property
    def compared_digest(self) -> str:
        """A hash of all documents that are compared, in both splits and however they are packed."""
        files = (self.tokens, self.mask, self.documents)
        hashes = [file.sha256 for file in files if file is not None]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def digest(self, split: StoredSplit) -> str:
        """A hash of what is trained on in this split, wherever the files lie."""
        files = [self.tokens, self.mask, split.pieces, split.firsts]
        files += [] if self.preferred is None else [self.preferred]
        return hashlib.sha256(" ".join(file.sha256 for file in files).encode()).hexdigest()


@dataclass(slots=True)
class _Row:
    """What is known of all examples while they are written. The examples of a pair count once."""

    lengths: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    """The tokens of each document: of each example of a pair."""
    preferred: list[bool] = field(default_factory=list)
    num_cut: int = 0
    cut: list[str] = field(default_factory=list)

    def add(self, examples: tuple[Example, ...]) -> None:
        sizes = [len(example.ids) for example in examples]
        self.lengths.append(sum(sizes))
        self.documents += sizes
        self.preferred += [example.is_preferred for example in examples]
        self.trained.append(sum(int(example.mask.sum()) for example in examples))
        first = examples[0]
        self.draws.append(first.draw)
        self.num_cut += first.is_cut
        if first.is_cut and len(self.cut) < _NAMED_CUT:
            self.cut.append(first.document)


def prepare_conversations(
    config: DataConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    cache_root: Path,
    *,
    verify: bool = True,
    say: Say = silent,
) -> StoredConversations:
    """The source's conversations, from the cache where the same content was rendered before.

    Files from the cache are hashed, unless another process does that (`verify`).
    """
    directory = conversations_directory(config, tokenizer, template, cache_root)
    is_new = build_directory(
        directory, lambda aside: _write(config, tokenizer, template, aside, say)
    )
    stored = read_conversations(directory)
    if verify and not is_new:
        validate_content(stored.files)
    # The budget is no part of the key: a stricter run must refuse what a laxer one has stored.
    FaultBudget(config.max_corrupt).skip_all(stored.skipped)
    return stored


def conversations_directory(
    config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate, cache_root: Path
) -> Path:
    """Where the cache keeps what these settings give."""
    key = key_of(
        {
            "conversations": FORMAT,
            "source": describe_source(config, cache_root),
            "form": config.format,
            "template": template.identity,
            "tokenizer": tokenizer.identity,
            "vocab_size": tokenizer.vocab_size,
            "seq_len": config.seq_len,
            "packing": packing_of(config),
            "eval_fraction": config.eval_fraction,
        }
    )
    return cache_root / f"tokens-{key}"


def read_conversations(directory: Path) -> StoredConversations:
    """What a directory of the cache holds."""
    try:
        index = read_json(directory / "index.json")

        def file_of(name: str, found: Mapping[str, Any]) -> ArrayFile:
            sizes = found["dtype"], found["length"], found["sha256"]
            return ArrayFile(directory / f"{name}.bin", *sizes)

        def split_of(name: str) -> StoredSplit:
            found = index[name]
            pieces, firsts = (
                file_of(f"{name}-{part}", found[part]) for part in ("pieces", "firsts")
            )
            return StoredSplit(pieces, firsts, **found["counts"])

        stored = StoredConversations(
            file_of("tokens", index["tokens"]),
            file_of("mask", index["mask"]),
            split_of("train"),
            split_of("eval") if "eval" in index else None,
            tuple(index["skipped"]),
            index["num_cut"],
            tuple(index["cut"]),
            index.get("unit", "conversation"),
            *(file_of(name, index[name]) if name in index else None for name in _COMPARED),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damaged(directory, f"index.json: {error}") from error
    validate_sizes(stored.files)
    return stored


def _write(
    config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate, directory: Path, say: Say
) -> None:
    faults, row = FaultBudget(config.max_corrupt), _Row()
    progress = TokenProgress(say, f"{config.unit}s")
    with (
        ArrayWriter(directory / "tokens.bin", smallest_dtype(tokenizer.vocab_size)) as tokens,
        ArrayWriter(directory / "mask.bin", "bool") as mask,
    ):
        for examples in read_examples(config, template, faults.skip_record):
            for example in examples:
                tokens.write(example.ids)
                mask.write(example.mask)
            row.add(examples)
            progress.add(row.lengths[-1])
    if not row.lengths:
        raise nothing_left(config, faults.named)
    index = {
        "tokens": _described(tokens.file()),
        "mask": _described(mask.file()),
        "skipped": faults.named,
        "num_cut": row.num_cut,
        "cut": row.cut,
        "unit": config.unit,
    }
    if config.has_preferences:
        ends = np.cumsum([0, *row.documents], dtype=np.int64)
        index["documents"] = _write_array(directory / "documents.bin", ends)
        index["preferred"] = _write_array(directory / "preferred.bin", np.array(row.preferred))
    for name, chosen in _split(row.draws, config.eval_fraction).items():
        index[name] = _write_split(config, row, chosen, directory, name)
    write_index(directory, index)


def _split(draws: list[int], fraction: float) -> dict[str, NDArray[np.int64]]:
    """The numbers of the conversations of each split. Both get one, or there is only one split."""
    drawn = np.array(draws, dtype=np.uint64)
    if fraction == 0:
        return {"train": np.arange(len(drawn))}
    lowest, highest = int(drawn.min()), int(drawn.max())
    if lowest == highest:
        raise one_document(fraction)
    # With few conversations one side may be empty by chance.
    below = min(max(round(fraction * DRAW_RANGE), lowest + 1), highest)
    is_held_out = drawn < np.uint64(below)
    return {"train": np.flatnonzero(~is_held_out), "eval": np.flatnonzero(is_held_out)}


def _write_split(
    config: DataConfig, row: _Row, chosen: NDArray[np.int64], directory: Path, name: str
) -> dict[str, Any]:
    lengths = np.array(row.lengths, dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    windows = pack(begins[chosen], lengths[chosen], config.seq_len, packing_of(config))
    if config.format == "pairs":
        windows = split_pairs(windows, np.cumsum([0, *row.documents], dtype=np.int64))
    files = {
        part: _write_array(directory / f"{name}-{part}.bin", values)
        for part, values in (("pieces", windows.pieces), ("firsts", windows.firsts))
    }
    counts = {
        "num_conversations": len(chosen),
        "num_tokens": int(lengths[chosen].sum()),
        "num_trained_tokens": int(np.array(row.trained)[chosen].sum()),
    }
    return {**files, "counts": counts}


def _write_array(path: Path, values: NDArray[Any]) -> dict[str, Any]:
    with ArrayWriter(path, str(values.dtype)) as writer:
        writer.write(values)
    return _described(writer.file())


def _described(file: ArrayFile) -> dict[str, Any]:
    return {"dtype": file.dtype, "length": file.length, "sha256": file.sha256}
