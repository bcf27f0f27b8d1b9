"""Whether a model comes with a tokenizer, by its name and its files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shardwise.facts.presets import PRESETS
from shardwise.files import user_path, validate_file

# The last four are what families had before `tokenizer.json`; transformers still reads them.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)

# The largest vocabularies take a tenth of it.
MAX_TOKENIZER_BYTES = 2**28


def has_own_tokenizer(model_name: str) -> bool:
    """Whether a model has a tokenizer: not a preset, which is only a shape, nor a directory without
    the files.

    A hub id is taken to have one; loading it will show.
    """
    if model_name in PRESETS:
        return False
    directory = user_path(model_name)
    return _holds_tokenizer(directory) if directory.is_dir() else True


def validate_tokenizer_files(directory: Path) -> None:
    """Raise OSError where one of the files is a pipe, a device or far too large to be one."""
    for name in TOKENIZER_FILES:
        with suppress(FileNotFoundError):
            validate_file(directory / name, MAX_TOKENIZER_BYTES)


def _holds_tokenizer(directory: Path) -> bool:
    return any((directory / file).is_file() for file in TOKENIZER_FILES)
