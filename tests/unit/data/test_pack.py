from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardwise.config.schema import DataConfig
from shardwise.data import cache, content, pack
from shardwise.data.arrays import smallest_dtype
from shardwise.data.pack import content_key, prepare_tokens
from shardwise.data.tokenizer import ByteTokenizer, load_tokenizer
from shardwise.data.tokens import TokenFile
from shardwise.errors import UserError

BYTES = ByteTokenizer()


def write_lines(path: Path, texts: list[str], *bad: str) -> Path:
    path.write_text("\n".join([*(json.dumps({"text": text}) for text in texts), *bad]) + "\n")
    return path


def documents_of(file: TokenFile | None) -> list[str]:
    assert file is not None
    tokens = file.open()
    ends = np.flatnonzero(tokens == BYTES.eos_id) + 1
    assert ends[-1] == len(tokens) == file.num_tokens
    return [BYTES.decode(part) for part in np.split(tokens, ends)[:-1]]


def jsonl(path: Path, **settings: object) -> DataConfig:
    return DataConfig(source="jsonl", path=str(path), **settings)


def test_documents_are_packed_back_to_back_with_an_end_after_each(tmp_path: Path) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one", "two", "three"]))
    packed = prepare_tokens(config, BYTES, tmp_path / "cache")
    assert documents_of(packed.train) == ["one", "two", "three"]
    assert packed.eval is None
    assert packed.num_documents == 3
    assert packed.train.open().dtype == np.uint16


def test_second_call_reuses_the_cache_and_still_reports_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one"], "broken"))
    first = prepare_tokens(config, BYTES, tmp_path / "cache")
    monkeypatch.delattr(pack, "read_documents")
    assert prepare_tokens(config, BYTES, tmp_path / "cache") == first
    assert len(first.skipped) == 1
    assert first.skipped[0].startswith(f"{tmp_path}/a.jsonl:2: invalid JSON")


def test_a_stricter_budget_refuses_what_the_cache_holds(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["one"], "broken")
    prepare_tokens(jsonl(path), BYTES, tmp_path / "cache")
    with pytest.raises(UserError, match=r"a\.jsonl:2: invalid JSON"):
        prepare_tokens(jsonl(path, max_corrupt=0), BYTES, tmp_path / "cache")


def test_key_follows_content_but_not_settings_that_leave_it_alone(
    tmp_path: Path, save_tokenizer: Callable[..., Path]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    key = content_key(jsonl(path), BYTES)
    assert content_key(jsonl(path, seq_len=8, max_corrupt=0, shuffle=False), BYTES) == key
    assert content_key(jsonl(path, eval_fraction=0.5), BYTES) != key
    assert content_key(jsonl(path, field="body"), BYTES) != key
    assert content_key(jsonl(path), load_tokenizer(str(save_tokenizer()), "")) != key
    write_lines(path, ["one", "more"])
    os.utime(path, ns=(0, 1))
    assert content_key(jsonl(path), BYTES) != key


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one"], "broken"), max_corrupt=0)
    with pytest.raises(UserError):
        prepare_tokens(config, BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_run_left_is_not_used_and_goes_after_a_day(tmp_path: Path) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one"]))
    name = f".tokens-{content_key(config, BYTES)}"
    fresh, old = tmp_path / "cache" / f"{name}-1", tmp_path / "cache" / f"{name}-2"
    for aside in (fresh, old):
        aside.mkdir(parents=True)
        (aside / "train.bin").write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (old / "train.bin", old):
        os.utime(path, (two_days_ago, two_days_ago))
    assert documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").train) == ["one"]
    assert fresh.exists()
    assert not old.exists()


def test_builders_at_the_same_time_agree(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(200)]
    config = jsonl(write_lines(tmp_path / "a.jsonl", texts), eval_fraction=0.1)
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda _: prepare_tokens(config, BYTES, tmp_path / "cache"), range(4))
        )
    assert len(set(results)) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [
        f"tokens-{content_key(config, BYTES)}"
    ]


def test_the_loser_of_the_rename_takes_the_winners_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one"]))
    publish = cache.publish

    def lose(aside: Path, directory: Path) -> None:
        shutil.copytree(aside, directory)
        publish(aside, directory)

    monkeypatch.setattr(cache, "publish", lose)
    assert documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").train) == ["one"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("file", ["train.bin", "index.json"])
def test_damaged_cache_is_named(tmp_path: Path, file: str) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one"]))
    packed = prepare_tokens(config, BYTES, tmp_path / "cache")
    with (packed.train.path.parent / file).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(UserError, match="is damaged"):
        prepare_tokens(config, BYTES, tmp_path / "cache")


def test_a_changed_token_is_found(tmp_path: Path) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["one", "two"]), eval_fraction=0.5)
    packed = prepare_tokens(config, BYTES, tmp_path / "cache")
    for file in (packed.train, packed.eval):
        assert file is not None
        whole = file.path.read_bytes()
        file.path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(UserError, match=r"is damaged") as caught:
            prepare_tokens(config, BYTES, tmp_path / "cache")
        assert caught.value.why == f"{file.path.name}: its content has changed"
        # One rank of a node looks for all of them.
        assert prepare_tokens(config, BYTES, tmp_path / "cache", verify=False) == packed
        file.path.write_bytes(whole)
    assert prepare_tokens(config, BYTES, tmp_path / "cache") == packed


@pytest.mark.parametrize("kept_above", [0, 2**30], ids=["hashes kept", "hashed anew"])
def test_another_text_of_the_same_size_and_time_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_above: int
) -> None:
    monkeypatch.setattr(content, "WORTH_KEEPING_BYTES", kept_above)
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    before = path.stat()
    first = prepare_tokens(jsonl(path), BYTES, tmp_path / "cache")
    write_lines(path, ["one", "six"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = prepare_tokens(jsonl(path), BYTES, tmp_path / "cache")
    assert documents_of(first.train) == ["one", "two"]
    assert documents_of(second.train) == ["one", "six"]


def test_files_that_nobody_touched_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WORTH_KEEPING_BYTES", 0)
    path = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    hashes = content.hashes_of([path], tmp_path / "cache")
    assert hashes == [content.hash_of(path)]
    monkeypatch.setattr(content, "hash_of", lambda path: "read again")
    assert content.hashes_of([path], tmp_path / "cache") == hashes
    path.chmod(0o600)
    assert content.hashes_of([path], tmp_path / "cache") == ["read again"]


def test_split_takes_about_its_share_and_every_document_once(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    config = jsonl(write_lines(tmp_path / "a.jsonl", texts), eval_fraction=0.2)
    packed = prepare_tokens(config, BYTES, tmp_path / "cache")
    train, held_out = documents_of(packed.train), documents_of(packed.eval)
    assert sorted(train + held_out) == sorted(texts)
    assert 150 < len(held_out) < 250


def test_split_does_not_depend_on_the_other_documents(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for i in range(100):
        (tmp_path / "docs" / f"{i:03d}.txt").write_text(f"text {i}")
    config = DataConfig(source="text", path=str(tmp_path / "docs"), eval_fraction=0.3)
    before = set(documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").eval))
    for i in range(0, 100, 2):
        (tmp_path / "docs" / f"{i:03d}.txt").unlink()
    after = set(documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").eval))
    assert after == {text for text in before if int(text.split()[1]) % 2}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("num_documents", [2, 3])
def test_both_splits_get_a_document(tmp_path: Path, fraction: float, num_documents: int) -> None:
    texts = [f"document {i}" for i in range(num_documents)]
    config = jsonl(write_lines(tmp_path / "a.jsonl", texts, "broken"), eval_fraction=fraction)
    packed = prepare_tokens(config, BYTES, tmp_path / "cache")
    train, held_out = documents_of(packed.train), documents_of(packed.eval)
    assert train
    assert held_out
    assert sorted(train + held_out) == texts
    assert len(packed.skipped) == 1


def test_split_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(40)]
    held_out = []
    for place in ("here", "elsewhere"):
        (tmp_path / place).mkdir()
        config = jsonl(write_lines(tmp_path / place / "a.jsonl", texts), eval_fraction=0.3)
        held_out.append(documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").eval))
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("texts", [["one"], ["one", "one"]])
def test_one_document_cannot_be_split(tmp_path: Path, texts: list[str]) -> None:
    config = jsonl(write_lines(tmp_path / "a.jsonl", texts), eval_fraction=0.1)
    with pytest.raises(UserError, match="single document cannot be split"):
        prepare_tokens(config, BYTES, tmp_path / "cache")


def test_no_text_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    config = DataConfig(source="text", path=str(tmp_path))
    with pytest.raises(UserError, match="has no text"):
        prepare_tokens(config, BYTES, tmp_path / "cache")


def test_hugging_face_tokens(tmp_path: Path, save_tokenizer: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer()), "tiny-llama")
    config = jsonl(write_lines(tmp_path / "a.jsonl", ["hello world", "   ", "world"]))
    packed = prepare_tokens(config, tokenizer, tmp_path / "cache")
    assert packed.train.open().tolist() == [2, 3, 1, 3, 1]
    assert packed.num_documents == 2


def test_many_batches_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(pack, "BATCH_CHARACTERS", 20)
    texts = [f"document {i} " * (i % 4 + 1) for i in range(50)]
    config = jsonl(write_lines(tmp_path / "a.jsonl", texts))
    assert documents_of(prepare_tokens(config, BYTES, tmp_path / "cache").train) == texts


def test_dtype_holds_the_largest_id() -> None:
    assert smallest_dtype(65536) == "uint16"
    assert smallest_dtype(65537) == "uint32"
