from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.schema import DataConfig
from shardwise.data.splits import DataSplits, build_sequences
from shardwise.errors import UserError


def build(config: DataConfig, cache_root: Path, **changes: Any) -> DataSplits:
    settings: dict[str, Any] = {"vocab_size": 320, "model_name": "tiny-llama", "seed": 0}
    return build_sequences(config, cache_root=cache_root, **(settings | changes))


def write_texts(directory: Path, num_texts: int) -> str:
    directory.mkdir()
    for i in range(num_texts):
        (directory / f"{i}.txt").write_text(f"hello world number {i}")
    return str(directory)


def test_text_becomes_two_splits(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "docs", 20)
    config = DataConfig(source="text", path=path, seq_len=16, eval_fraction=0.2)
    splits = build(config, tmp_path / "cache")
    assert splits.eval is not None
    assert splits.tokenizer_identity == "byte"
    assert splits.skipped == ()
    inputs, labels, *_ = splits.train.get(0)
    assert bytes(inputs.tolist()).decode() == "hello world number 0"[:16]
    assert (labels[:-1] == inputs[1:]).all()
    assert splits.num_train_tokens > 16 * (len(splits.train) - 1)


def test_model_directory_brings_its_tokenizer(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    path = write_texts(tmp_path / "docs", 3)
    config = DataConfig(source="text", path=path, seq_len=4)
    splits = build(config, tmp_path / "cache", vocab_size=4, model_name=str(save_tokenizer()))
    assert splits.train.get(0)[0].tolist() == [2, 3, 0, 0]


def test_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    config = DataConfig(source="text", path=write_texts(tmp_path / "docs", 2), seq_len=4)
    with pytest.raises(UserError, match="tokenizer byte has 257 tokens, the model only 256"):
        build(config, tmp_path / "cache", vocab_size=256)
    assert not (tmp_path / "cache").exists()


def test_less_than_one_sequence_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "docs", 1)  # 20 bytes and the end
    build(DataConfig(source="text", path=path, seq_len=20), tmp_path / "cache")
    with pytest.raises(UserError, match="21 tokens, which is not one full sequence"):
        build(DataConfig(source="text", path=path, seq_len=21), tmp_path / "cache")


def test_synthetic_needs_no_files(tmp_path: Path) -> None:
    config = DataConfig(source="synthetic", seq_len=8, eval_fraction=0.1)
    splits = build(config, tmp_path / "cache")
    assert splits.eval is not None
    assert splits.train.get(0)[0].tolist() != splits.eval.get(0)[0].tolist()
    assert build(DataConfig(source="synthetic", seq_len=8), tmp_path).eval is None
    assert not (tmp_path / "cache").exists()


def test_stdlib_is_the_default(tmp_path: Path) -> None:
    splits = build(DataConfig(eval_fraction=0.05), tmp_path / "cache")
    assert splits.num_train_tokens > 1_000_000
    assert splits.eval is not None
    assert len(splits.eval) > 0
