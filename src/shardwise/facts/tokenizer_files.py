"""Whether a model comes with a tokenizer, told from its name and its files."""

from __future__ import annotations

from pathlib import Path

from shardwise.facts.presets import PRESETS
from shardwise.files import user_path

# The last four are what families had before `tokenizer.json`; transformers still reads them.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)


def has_own_tokenizer(model_name: str) -> bool:
    """False for a preset, which is a shape and nothing else, and for a directory without the
    files. A hub id is taken to have one: to load it is to find out."""
    if model_name in PRESETS:
        return False
    directory = user_path(model_name)
    return _holds_tokenizer(directory) if directory.is_dir() else True


def _holds_tokenizer(directory: Path) -> bool:
    return any((directory / file).is_file() for file in TOKENIZER_FILES)
