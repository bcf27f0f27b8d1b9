from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shardwise.training.heartbeat import HEARTBEAT_VARIABLE, Heartbeat, Phase, Sign


def sign_in(folder: Path) -> Sign:
    return Sign.from_bytes((folder / f"3-{os.getpid()}").read_bytes())


def heartbeat(folder: Path) -> Heartbeat:
    return Heartbeat(3, timeout_s=9.0, environ={HEARTBEAT_VARIABLE: str(folder)})


def test_a_rank_says_what_it_is_at(tmp_path: Path) -> None:
    beat = heartbeat(tmp_path)
    first = sign_in(tmp_path)
    assert (first.rank, first.pid, first.phase) == (3, os.getpid(), Phase.IMPORTING)
    assert not first.has_begun and first.timeout_s == 9.0 and first.born > 0
    beat.begin()
    second = sign_in(tmp_path)
    assert (second.phase, second.has_begun) == (Phase.TRAINING, True)
    assert second.beat != first.beat
    with beat.during(Phase.SAVING):
        assert sign_in(tmp_path).phase == Phase.SAVING
    assert sign_in(tmp_path).phase == Phase.TRAINING and sign_in(tmp_path).has_begun


def test_steps_have_the_time_that_is_set_and_all_else_at_least_half_an_hour(tmp_path: Path) -> None:
    beat = heartbeat(tmp_path)
    assert sign_in(tmp_path).allowance_s(9.0) == 1800.0
    assert sign_in(tmp_path).allowance_s(3600.0) == 3600.0
    beat.begin()
    assert sign_in(tmp_path).allowance_s(9.0) == 9.0


def test_nobody_watches() -> None:
    Heartbeat(0, environ={}).beat()


def test_a_sign_that_cannot_be_written_is_removed_and_counted(tmp_path: Path) -> None:
    """A rank that shows nothing is not taken to stand still."""
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    beat = heartbeat(folder)
    beat.begin()
    full = os.open("/dev/full", os.O_WRONLY)
    assert beat._file is not None
    os.dup2(full, beat._file)
    beat.beat()
    assert list(folder.iterdir()) == []
    beat.beat()
    assert sign_in(folder).lost == 1 and sign_in(folder).phase == Phase.TRAINING
    os.close(full)


def test_a_full_disk_has_room_for_signs_that_are_there_already(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        beat = heartbeat(tmp_path)
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "more").write_bytes(b"x" * 5000)
        beat.begin()
        assert sign_in(tmp_path).has_begun and sign_in(tmp_path).lost == 0
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
