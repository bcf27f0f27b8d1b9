from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.data.sequences import IGNORE_INDEX, Sequence


class CountingSequences:
    """Sequence i is all i, so that a batch tells which sequences it was made of."""

    def __init__(self, length: int, seq_len: int = 4) -> None:
        self.length = length
        self.seq_len = seq_len

    def __len__(self) -> int:
        return self.length

    def get(self, index: int) -> Sequence:
        if not 0 <= index < self.length:
            raise IndexError(index)
        inputs = np.full(self.seq_len, index, dtype=np.int64)
        labels = inputs.copy()
        labels[0] = IGNORE_INDEX
        return Sequence(inputs, labels)


@pytest.fixture
def counting_sequences() -> type[CountingSequences]:
    return CountingSequences


@pytest.fixture
def save_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    def save(words: tuple[str, ...] = ("hello", "world"), eos: str | None = "</s>") -> Path:
        vocab = {word: i for i, word in enumerate(("<unk>", "</s>", *words))}
        backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        directory = tmp_path / "tokenizer"
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=eos)
        fast.save_pretrained(directory)
        return directory

    return save
