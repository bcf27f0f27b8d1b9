"""What is read of files: plain ones, of a size, and JSON of a depth."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hostile import put_holes, put_pipe, within

from shardwise.files import bounded_lines, free_name, open_file, parse_json, read_bytes, read_json


def refused(path: Path, max_bytes: int = 1000) -> str:
    with within(5), pytest.raises(OSError) as caught:
        read_bytes(path, max_bytes)
    assert caught.value.filename == str(path)
    return caught.value.strerror or ""


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"a": [1]}')
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "file", 10) == read_bytes(tmp_path / "link", 10)
    assert read_json(tmp_path / "link") == {"a": [1]}


def test_what_is_no_plain_file_is_named(tmp_path: Path) -> None:
    assert refused(put_pipe(tmp_path / "pipe")) == "it is a pipe and no plain file"
    (tmp_path / "device").symlink_to("/dev/zero")
    assert refused(tmp_path / "device") == "it is a device and no plain file"
    assert refused(tmp_path) == "it is a directory and no plain file"
    assert refused(tmp_path / "missing") == "No such file or directory"
    assert refused(tmp_path / "a\0b") == "it holds a NUL character"


def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put_pipe(tmp_path / "file")
    (tmp_path / "other").touch()
    seen = os.stat(tmp_path / "other")
    monkeypatch.setattr(os, "stat", lambda path: seen)
    assert refused(file) == "it is a pipe and no plain file"


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = put_holes(tmp_path / "file", 2**40)
    assert "has 1099511627776 bytes, where at most 1000" in refused(file)
    with pytest.raises(OSError):
        read_json(file)
    open_file(file).close()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 200 + "1" + "}" * 200, "9" * 5000, "1" * 21],
)
def test_deep_trees_and_long_numbers_are_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"too deeply|64 bits"):
        parse_json(text)


def test_usual_json_is_read() -> None:
    assert parse_json('{"a": [[[1, -2.5, "x", null, true, 18446744073709551615]]]}') == {
        "a": [[[1, -2.5, "x", None, True, 2**64 - 1]]]
    }
    assert parse_json("7") == 7


def test_a_line_without_an_end_is_cut() -> None:
    stream = io.BytesIO(b"one\n" + b"x" * 25 + b"\ntwo")
    assert list(bounded_lines(stream, 10)) == [b"one\n", b"x" * 10, b"two"]


def test_a_free_name_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "home-2").touch()
    monkeypatch.chdir(home)
    assert free_name(home) == tmp_path / "home-3"
    assert free_name(Path(".")) == tmp_path / "home-3"
    assert free_name(Path("run.yaml")) == Path("run-2.yaml")
    assert free_name(Path("/")) == Path("/copy-2")
