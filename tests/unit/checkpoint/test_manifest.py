from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.durable_files import Fingerprint
from shardwise.checkpoint.eval_history import HeldOut
from shardwise.checkpoint.manifest import MANIFEST_NAME, Damaged, Manifest, read_manifest


def manifest_of(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "step": 60,
        "position": 61,
        "tokens": 122_880,
        "loss": 3.25,
        "global_batch": 16,
        "seed": 7,
        "world_size": 2,
        "loss_scale": {"scale": 65536.0, "held": 3.0},
        "versions": {"torch": "2.13"},
        "created": 1_700_000_000.5,
        "files": {
            "rank-00000.bin": Fingerprint(4096, "ab" * 32),
            "tensors.json": Fingerprint(77, "cd" * 32),
        },
    }
    return Manifest(**{**values, **changes})


def write(directory: Path, text: bytes) -> Path:
    (directory / MANIFEST_NAME).write_bytes(text)
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": None, "loss_scale": None},
        {"loss": 1e-300},
        {"files": {}},
        {"data": "sha256:ab"},
        {"held_out": HeldOut(step=60, loss=2.5, best_step=40, best_loss=2.25, reference=2.25)},
    ],
)
def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    manifest = manifest_of(**changes)
    assert read_manifest(write(tmp_path, manifest.to_bytes())) == manifest


def test_one_that_is_older_than_its_data_is_spelt_as_it_was(tmp_path: Path) -> None:
    manifest = manifest_of()
    assert manifest.data is None and b'"data"' not in manifest.to_bytes()


def test_its_size_is_that_of_its_files() -> None:
    assert manifest_of().total_bytes == 4096 + 77


def test_every_bit_matters(tmp_path: Path) -> None:
    text = manifest_of().to_bytes()
    for place in range(len(text)):
        flipped = bytearray(text)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(Damaged) as caught:
            read_manifest(write(tmp_path, bytes(flipped)))
        assert caught.value.file == MANIFEST_NAME


def test_every_length_matters(tmp_path: Path) -> None:
    text = manifest_of().to_bytes()
    for length in range(len(text)):
        with pytest.raises(Damaged):
            read_manifest(write(tmp_path, text[:length]))
    for tail in (b"\n", b" ", b"\0", text):
        with pytest.raises(Damaged):
            read_manifest(write(tmp_path, text + tail))


def test_the_same_values_spelt_otherwise_are_refused(tmp_path: Path) -> None:
    data = json.loads(manifest_of().to_bytes())
    with pytest.raises(Damaged, match="its own digest"):
        read_manifest(write(tmp_path, json.dumps(data).encode()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2; this version reads 1"),
        ({"step": 61}, "its own digest"),
        ({"digest": "0" * 64}, "its own digest"),
        ({"extra": 1}, "its own digest"),
        ({"files": {"../secret": {"bytes": 1, "sha256": ""}}}, "no checkpoint has"),
        ({"files": {"rank-00000.bin": {"bytes": 1}}}, "is not a manifest"),
        ({"data": 7}, "data is 7"),
        ({"data": None}, "its own digest"),
    ],
)
def test_what_is_changed_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    data = {**json.loads(manifest_of().to_bytes()), **change}
    with pytest.raises(Damaged, match=says):
        read_manifest(write(tmp_path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()))


def test_a_missing_one_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"manifest\.json: cannot be read: No such file"):
        read_manifest(tmp_path)


def test_a_huge_one_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(Damaged, match="far too large"):
        read_manifest(tmp_path)
