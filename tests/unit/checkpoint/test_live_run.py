"""Readers of a run whose job saves and prunes at the same time, and of what others laid there."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SHARD, make_model_checkpoint

from shardwise.checkpoint import audit, store
from shardwise.checkpoint.store import (
    Pruned,
    final_path,
    list_entries,
    outdated,
    quarantine,
    remove,
    validate_kept,
)
from shardwise.cli.main import main
from shardwise.report.collect import collect_run

Cli = pytest.CaptureFixture[str]
READS = (("checkpoint", "verify"), ("checkpoint", "ls"), ("checkpoint", "ls", "--verify"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_model_checkpoint(tmp_path / "demo" / "checkpoints", 20)
    return tmp_path / "demo"


def command(*words: object) -> int:
    sys.argv = ["shardwise", *map(str, words)]
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def save_and_prune(run: Path, step: int) -> None:
    """As a job with checkpoint.keep=1 does."""
    root = run / "checkpoints"
    make_model_checkpoint(root, step)
    remove(root, outdated(root, 1))


def test_verify_of_a_run_that_keeps_one(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = audit.fingerprint_of

    def read_late(path: Path, **options: Any) -> Any:
        if "step-00000020" in str(path) and not final_path(run / "checkpoints", 40).exists():
            save_and_prune(run, 40)
        return read(path, **options)

    monkeypatch.setattr(audit, "fingerprint_of", read_late)
    assert command("checkpoint", "verify", run) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 20: pruned meanwhile"
    assert said[1].startswith("step 40: good")
    assert said[2] == "1 verified, 0 damaged, 1 pruned meanwhile"


def test_what_goes_while_it_is_listed_is_not_listed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = store.read_manifest

    def read_late(path: Path) -> Any:
        shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(store, "read_manifest", read_late)
    assert list_entries(run / "checkpoints") == []


def test_what_goes_while_its_size_is_summed_is_no_error(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def scan_late(path: Any = ".") -> Any:
        if str(path) == str(final_path(run / "checkpoints", 20)):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert command("checkpoint", "verify", run) == 0
    assert "1 verified, 0 damaged" in capsys.readouterr().out


def test_an_export_of_what_goes_says_so(run: Path, tmp_path: Path) -> None:
    import torch

    from shardwise.checkpoint.index import read_index
    from shardwise.checkpoint.read import read_tensor

    path = final_path(run / "checkpoints", 20)
    stored = read_index(path)["model.lm_head.weight"]
    assert read_tensor(path, stored, torch.float32).shape == (16, 4)
    save_and_prune(run, 40)
    with pytest.raises(Pruned, match="was removed while it was read"):
        read_tensor(path, stored, torch.float32)
    with pytest.raises(Pruned):
        validate_kept(path)


def test_readers_beside_a_job_that_prunes_see_no_damage(run: Path, capsys: Cli) -> None:
    over = threading.Event()
    steps = iter(range(40, 10**6, 20))

    def work() -> None:
        while not over.is_set():
            save_and_prune(run, next(steps))

    job = threading.Thread(target=work)
    job.start()
    try:
        for number in range(12):
            assert command(*READS[number % len(READS)], run) == 0
            assert not [e for e in collect_run(run).checkpoints if e.is_bad]
    finally:
        over.set()
        job.join()
    assert "DAMAGED" not in capsys.readouterr().out


# ---- what others laid there ------------------------------------------------------------------


def test_a_reason_is_read_so_far_and_no_further(run: Path, capsys: Cli) -> None:
    target = quarantine(final_path(run / "checkpoints", 20), ["broken"])
    with (target / "reason.txt").open("r+b") as file:
        file.truncate(3 * 2**30)
    (entry,) = list_entries(run / "checkpoints")
    assert len(entry.reason) <= 64 * 1024
    assert entry.reason.startswith("broken")
    (target / "reason.txt").unlink()
    os.mkfifo(target / "reason.txt")
    assert command("checkpoint", "ls", run) == 0
    assert "quarantined" in capsys.readouterr().out
    (target / "reason.txt").unlink()
    (target / "reason.txt").symlink_to("/dev/zero")
    assert list_entries(run / "checkpoints")[0].reason == ""


def test_quarantine_writes_through_no_link(run: Path, tmp_path: Path) -> None:
    root, elsewhere = run / "checkpoints", tmp_path / "elsewhere"
    final_path(root, 20).rename(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    final_path(root, 20).symlink_to(elsewhere)
    target = quarantine(final_path(root, 20), ["broken"])
    assert target.is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == before
    assert [entry.state for entry in list_entries(root)] == ["quarantined"]
    # Nor over a file that a link of the right name points to.
    (tmp_path / "precious").write_text("mine")
    (make_model_checkpoint(root, 40).path / "reason.txt").symlink_to(tmp_path / "precious")
    target = quarantine(final_path(root, 40), [f"{SHARD}: was cut"])
    assert (tmp_path / "precious").read_text() == "mine"
    assert (target / "reason.txt").read_text() == f"{SHARD}: was cut\n"
    assert not (target / "reason.txt").is_symlink()


def test_an_empty_plan_is_damage_by_name(run: Path, capsys: Cli) -> None:
    from test_hostile import seal

    path = final_path(run / "checkpoints", 20)
    for text in ("", "[]", "{}", "null", '{"config": 1}', "[" * 5000, '{"config": {}}'):
        (path / "plan.json").write_text(text)
        seal(path)
        assert command("checkpoint", "verify", run) == 5
        assert "plan.json: is not a plan: " in capsys.readouterr().out
        assert command("export", run, "--to", run / "out") == 5
        assert "plan.json: is not a plan: " in capsys.readouterr().err
