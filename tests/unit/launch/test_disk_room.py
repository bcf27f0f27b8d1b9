from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from shardwise.checkpoint.store import begin
from shardwise.cli.main import main
from shardwise.files import free_bytes
from shardwise.launch import disk_room, this_machine
from shardwise.units import MIB

CONFIG = """\
name: run
model: tiny-llama
data: {source: synthetic, seq_len: 16}
cluster: 1xCPU
train: {steps: 60}
checkpoint: {every: 10, keep: 3}
"""
SIZE = 100 * MIB
Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """`shardwise train` in this process with so much room: exit code and error. It ends where it
    would start ranks."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.setattr(this_machine, "run_supervised", lambda *_: sys.exit(0))
    monkeypatch.setattr(disk_room, "checkpoint_bytes", lambda _: SIZE)

    def start(free: int, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(disk_room, "free_bytes", lambda _: free)
        config = str(tmp_path / "run.yaml")
        command = ["shardwise", "train", config, f"runs_dir={tmp_path}", *words]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return start


def test_a_disk_without_room_is_refused_with_figures(train: Train, tmp_path: Path) -> None:
    code, said = train(0)
    assert code == 4
    assert f"{tmp_path / 'run' / 'checkpoints'} has no room for 4 more checkpoints of" in said
    assert "400.0 MiB are needed, 0 B are free" in said
    assert "checkpoint.keep=" not in said.partition("fix:")[2]
    assert not (tmp_path / "run").exists()


def test_the_fix_holds_when_typed(train: Train) -> None:
    code, said = train(3 * SIZE)
    assert code == 4
    assert "set checkpoint.keep=2," in said
    assert train(3 * SIZE, "checkpoint.keep=2") == (0, "")
    assert train(4 * SIZE) == (0, "")


@pytest.mark.parametrize(
    ("words", "checkpoints"),
    [
        (("train.steps=10",), 1),
        (("train.steps=11",), 2),
        (("train.steps=11", "checkpoint.at_end=false"), 1),
        (("train.stop_after=5",), 1),
        (("checkpoint.every=0",), 1),
        (("checkpoint.every=0", "checkpoint.at_end=false"), 0),
        (("checkpoint.keep=1",), 2),
        (("checkpoint.keep=9",), 6),
        (("checkpoint.keep_best=true", "train.eval_every=7", "data.eval_fraction=0.1"), 5),
    ],
)
def test_what_the_run_will_hold_is_needed(
    train: Train, words: tuple[str, ...], checkpoints: int
) -> None:
    assert train(checkpoints * SIZE, *words) == (0, "")
    if checkpoints:
        assert train(checkpoints * SIZE - 1, *words)[0] == 4


def test_checkpoints_that_are_there_need_no_room(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "validate_resume", lambda plan: None)
    for step in (10, 20, 30):
        make_checkpoint(tmp_path / "run" / "checkpoints", step)
    assert train(SIZE) == (0, "")
    code, said = train(SIZE - 1)
    assert code == 4
    assert "has no room for 1 more checkpoint of" in said
    (begin(tmp_path / "run" / "checkpoints", 40) / "rank-00000.bin").write_bytes(b"cut off")
    assert train(SIZE - 1) == (0, "")


def test_free_space_of_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") is not None
