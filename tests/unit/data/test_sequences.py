from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.sequences import IGNORE_INDEX, SyntheticSequences, TokenSequences
from shardwise.data.tokens import TokenFile, TokenWriter

EOS = 999


def write_tokens(path: Path, num_tokens: int) -> TokenFile:
    with TokenWriter(path, "uint16") as writer:
        writer.append(np.arange(num_tokens - 1), EOS)
    return writer.written()


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 9, 10, 16, 17, 18, 100])
@pytest.mark.parametrize("seq_len", [1, 2, 8])
def test_every_prediction_is_made_exactly_once(
    tmp_path: Path, num_tokens: int, seq_len: int
) -> None:
    file = write_tokens(tmp_path / "tokens.bin", num_tokens)
    tokens = file.open().tolist()
    sequences = TokenSequences(file, seq_len, EOS)
    predictions: list[tuple[int, int]] = []
    for index in range(len(sequences)):
        inputs, labels, *_ = sequences.get(index)
        assert inputs.shape == labels.shape == (seq_len,)
        assert inputs.dtype == labels.dtype == np.int64
        counts = labels != IGNORE_INDEX
        assert (inputs[~counts] == EOS).all()
        predictions += zip(inputs[counts].tolist(), labels[counts].tolist(), strict=True)
    assert predictions == list(pairwise(tokens))


def test_index_beyond_the_end_is_refused(tmp_path: Path) -> None:
    sequences = TokenSequences(write_tokens(tmp_path / "tokens.bin", 9), 4, EOS)
    assert len(sequences) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            sequences.get(index)


def test_synthetic_is_a_pure_function_of_seed_and_index() -> None:
    sequences = SyntheticSequences(vocab_size=50, seq_len=64, seed=3)
    inputs, labels, *_ = sequences.get(7)
    again, *_ = SyntheticSequences(vocab_size=50, seq_len=64, seed=3).get(7)
    assert (inputs == again).all()
    assert (inputs[1:] == labels[:-1]).all()
    assert inputs.min() >= 0
    assert labels.max() < 50
    assert (inputs != sequences.get(8)[0]).any()
    assert (inputs != SyntheticSequences(50, 64, seed=4).get(7)[0]).any()
    assert (inputs != SyntheticSequences(50, 64, seed=-1).get(7)[0]).any()


def test_synthetic_has_an_end_that_no_run_reaches() -> None:
    sequences = SyntheticSequences(vocab_size=50, seq_len=4, seed=0)
    assert len(sequences) == 1 << 40
    sequences.get(len(sequences) - 1)
