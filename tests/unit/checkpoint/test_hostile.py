"""Checkpoints made to do harm: refused by name, nothing is run, nothing large is allocated.

Each case is sealed with a right digest and right hashes, as one who knows the format would.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SHARD, make_checkpoint

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.durable_files import Fingerprint, fingerprint_of
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.manifest import Damaged, Manifest, read_manifest
from shardwise.checkpoint.store import list_checkpoints, list_entries, quarantine

DEEP = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, 1).path


def tensor(**changes: Any) -> dict[str, Any]:
    """An honest entry of the index with `changes`."""
    return {"dtype": "float32", "shape": [8], "pieces": [[[0], [8], SHARD, 0]], **changes}


def piece(offsets: Any = (0,), sizes: Any = (8,), file: Any = SHARD, start: Any = 0) -> Any:
    return tensor(pieces=[[offsets, sizes, file, start]])


def seal(path: Path, **changes: Any) -> None:
    """Write a manifest that agrees with the files and with itself."""
    values = {name: getattr(read_manifest(path), name) for name in Manifest.__dataclass_fields__}
    values["files"] = {name: fingerprint_of(path / name) for name in values["files"]}
    (path / "manifest.json").write_bytes(Manifest(**{**values, **changes}).to_bytes())


def put_index(path: Path, index: Any) -> None:
    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    (path / "tensors.json").write_bytes(data)
    seal(path)


@contextmanager
def soon(seconds: int = 1) -> Iterator[None]:
    """Fails where the block hangs."""

    class Hangs(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_sealed_honest_checkpoint_passes(path: Path) -> None:
    put_index(
        path,
        {
            "x": tensor(shape=[4], pieces=[[[0], [4], SHARD, 0]]),
            "y": tensor(
                dtype="bool",
                shape=[2, 4],
                pieces=[[[0, 0], [2, 3], SHARD, 16], [[0, 3], [2, 1], SHARD, 22]],
            ),
        },
    )
    assert check_checkpoint(path) == []


@pytest.mark.parametrize(
    "index",
    [
        {"x": piece(file="/etc/passwd")},
        {"x": piece(file="../step-00000001/rank-00000.bin")},
        {"x": piece(file="./rank-00000.bin")},
        {"x": piece(file="rank-00000.bin\n")},
        {"x": piece(file="manifest.json")},
        {"x": piece(file=None)},
        {"x": piece(start=2**60)},
        {"x": piece(start=-4)},
        {"x": piece(start="0x0")},
        {"x": piece(start=None)},
        {"x": piece(sizes=[2**60])},
        {"x": piece(sizes=[2**47])},
        {"x": piece(sizes=[-8])},
        {"x": piece(offsets=[-1])},
        {"x": piece(offsets=[8])},
        {"x": piece(sizes=[8.0])},
        {"x": piece(sizes="8")},
        {"x": piece(sizes=8)},
        {"x": tensor(shape=[2**60])},
        {"x": tensor(shape=[2**47])},
        {"x": tensor(shape=[2**47, 2**47, 2**47], pieces=[])},
        {"x": tensor(shape=[-8])},
        {"x": tensor(shape={})},
        {"x": tensor(pieces=[])},
        {"x": tensor(pieces=[[[0], [8], SHARD, 0]] * 2)},
        {"x": tensor(pieces=[[[0], [8], SHARD]])},
        {"x": tensor(pieces=None)},
        {"x": tensor(dtype="object")},
        {"x": tensor(dtype="float33")},
        {"x": tensor(dtype="complex64")},
        {"x": tensor(dtype="__class__")},
        {"x": tensor(dtype=["float32"])},
        {"x": {"bytes": "gASVAAAA"}},
        {"x": 3},
        {"x": None},
        [tensor()],
        "text",
        7,
        b"",
        b"\xff\xfe\x00",
        b'{"x": ' + b"9" * 100_000 + b"}",
        DEEP,
    ],
    ids=lambda index: repr(index)[:60],
)
def test_an_index_that_lies_is_refused(path: Path, index: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    put_index(path, index)
    with pytest.raises(Damaged) as caught:
        read_index(path)
    assert caught.value.file == "tensors.json"
    assert [damage.file for damage in check_checkpoint(path)] == ["tensors.json"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


@pytest.mark.parametrize(
    "index",
    [
        {"x": tensor(pieces=[[[0], [6], SHARD, 0], [[4], [2], SHARD, 0]])},
        {
            "x": tensor(
                shape=[2, 4],
                pieces=[[[0, 0], [1, 4], SHARD, 0], [[0, 2], [2, 2], SHARD, 16]],
            )
        },
    ],
    ids=["rows", "blocks"],
)
def test_pieces_that_overlap_are_refused(path: Path, index: Any) -> None:
    put_index(path, index)
    assert check_checkpoint(path)


def test_an_infinite_start_is_refused(path: Path) -> None:
    put_index(path, json.dumps({"x": piece(start=1)}).replace(", 1]", ", 1e999]").encode())
    assert check_checkpoint(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../secret", "a/b", "", ".metadata", "x.bin"])
def test_a_manifest_that_lists_other_files_is_refused(path: Path, name: str) -> None:
    files = {**read_manifest(path).files, name: Fingerprint(1, "00" * 32)}
    seal(path, files=files)
    (damage,) = check_checkpoint(path)
    assert damage.file == "manifest.json"
    assert "no checkpoint has" in damage.reason
    assert list_checkpoints(path.parent) == []


@pytest.mark.parametrize("size", [2**60, -1, 0, 1.5, "32", None, [32]])
def test_sizes_that_lie_are_refused(path: Path, size: Any) -> None:
    honest = read_manifest(path).files
    seal(path, files={**honest, SHARD: Fingerprint(size, honest[SHARD].sha256)})
    # What is no size at all is the manifest's fault; a wrong one shows at the file.
    culprit = SHARD if type(size) is int and size >= 0 else "manifest.json"
    assert [damage.file for damage in check_checkpoint(path)] == [culprit]
    assert list_checkpoints(path.parent) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "many"},
        {"position": -1},
        {"position": None},
        {"tokens": [1]},
        {"loss": "low"},
        {"created": "now"},
        {"world_size": 0},
        {"loss_scale": "large"},
        {"versions": 3},
    ],
    ids=repr,
)
def test_scalars_of_another_kind_are_refused(path: Path, changes: dict[str, Any]) -> None:
    seal(path, **changes)
    assert check_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "plan.json", SHARD])
def test_links_are_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert [damage.file for damage in check_checkpoint(path)] == [name]
    assert list_checkpoints(path.parent) == []


@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "plan.json", SHARD])
def test_a_directory_in_place_of_a_file_is_refused(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()
    assert [damage.file for damage in check_checkpoint(path)] == [name]


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
def test_a_pipe_in_place_of_a_file_does_not_hang(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)
    with soon():
        assert check_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "plan.json", SHARD])
def test_a_pickle_in_place_of_a_file_is_not_run(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    assert [damage.file for damage in check_checkpoint(path)] == [name]
    with pytest.raises(Damaged):
        put_index(path, pickle.dumps(Payload(tmp_path / "canary")))
        read_index(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.pt", "rank-00009.bin"])
def test_a_stray_pickle_is_reported_and_not_run(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    (damage,) = check_checkpoint(path)
    assert str(damage) == f"{name}: does not belong to the checkpoint"
    read_index(path)
    assert not (tmp_path / "canary").exists()
    pickle.loads((path / name).read_bytes())
    assert (tmp_path / "canary").exists(), "the payload is a real one"


def test_a_deeply_nested_manifest_is_refused(path: Path) -> None:
    (path / "manifest.json").write_bytes(DEEP)
    assert [damage.file for damage in check_checkpoint(path)] == ["manifest.json"]


def test_a_name_that_is_no_text_is_quarantined(path: Path) -> None:
    put_index(path, {"\ud800": piece(start=2**60)})
    quarantine(path, map(str, check_checkpoint(path)))


def test_a_reason_that_is_no_text_stops_nothing(path: Path) -> None:
    target = quarantine(path, ["broken"])
    (target / "reason.txt").write_bytes(b"\xff\xfe")
    assert list_entries(path.parent)[0].state == "quarantined"
