"""How much data there is to train on, before any of it is read."""

from __future__ import annotations

from shardwise.config.mixed_datasets import datasets_of
from shardwise.config.schema import DataConfig
from shardwise.config.suffixes import COMPRESSED
from shardwise.data.paths import find_files, stdlib_files
from shardwise.errors import UserError
from shardwise.plan.whole_run import DataSize, PartSize
from shardwise.units import format_bytes, format_count

# English text and code in vocabularies of 32,000 to 256,000 tokens: 3.5 to 4.7.
_BYTES_PER_TOKEN = 4.0
_NOT_YET = "known once the data was read"


def size_of_data(config: DataConfig, tokenizer: str) -> DataSize:
    """The tokens of a source by the sizes of its files. Nothing is opened or fetched."""
    if not config.mixture:
        return _size_of_one(config, tokenizer)
    parts = tuple(
        PartSize(name=each.name, share=each.share, size=_size_of_one(each.data, tokenizer))
        for each in datasets_of(config)
    )
    known = [part.size.tokens for part in parts if part.size.tokens is not None]
    if len(known) < len(parts):
        missing = ", ".join(part.name for part in parts if part.size.tokens is None)
        return DataSize(tokens=None, words=f"the size of {missing} is not known", parts=parts)
    words = f"about {format_count(sum(known))} tokens in {len(parts)} datasets"
    return DataSize(tokens=sum(known), words=words, parts=parts)


def _size_of_one(config: DataConfig, tokenizer: str) -> DataSize:
    if config.source == "synthetic":
        return DataSize(tokens=None, words="synthetic data has no end")
    if config.source not in ("stdlib", "text", "jsonl"):
        return DataSize(tokens=None, words=_NOT_YET)
    try:
        files = stdlib_files() if config.source == "stdlib" else find_files(config)
        held = sum(file.stat().st_size for file in files)
    except (UserError, OSError):
        return DataSize(tokens=None, words="the data is not on this machine")
    if not held or any(file.name.endswith(COMPRESSED) for file in files):
        return DataSize(tokens=None, words=_NOT_YET)
    per_token = 1.0 if tokenizer == "byte" else _BYTES_PER_TOKEN
    tokens = (1 - config.eval_fraction) * held / per_token
    told = f"about {format_count(tokens)} tokens in {format_bytes(held)}"
    return DataSize(tokens=tokens, words=told)
