"""What cannot be read is not damaged: nothing is set aside, and nothing begins anew."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import SHARD, make_model_checkpoint
from powerless import run_powerless

from shardwise.checkpoint import durable_files
from shardwise.checkpoint.may_resume import validate_resume
from shardwise.checkpoint.restore import find_good
from shardwise.checkpoint.store import quarantine
from shardwise.cli.main import main
from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.mesh import World
from shardwise.plan.planned import Plan
from shardwise.report.collect import collect_run

STEPS = (2, 4)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    for step in STEPS:
        make_model_checkpoint(tmp_path / "demo" / "checkpoints", step)
    yield tmp_path / "demo"
    for path in [tmp_path / "demo/checkpoints", *(tmp_path / "demo/checkpoints").glob("step-*")]:
        if not path.is_symlink():
            path.chmod(0o755)  # so that pytest can remove it


def newest(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS[-1]:08d}"


def plan_of(run: Path, *words: str) -> Plan:
    names = [f"runs_dir={run.parent}", f"name={run.name}", "cluster=1xCPU", "data.source=synthetic"]
    return choose_plan(load_config(None, [*names, *words]), environ={})


def search(run: Path) -> int:
    """As a rank does at its start; the exit code of its error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = find_good(
            run / "checkpoints", World.joined(), verify=True, tell=lambda path, why: None
        )
        return 0 if found is None else 100 + found.step
    except UserError as error:
        print(error)
        return int(error.code)


def command(*words: object) -> int:
    sys.argv = ["shardwise", *map(str, words)]
    main()
    return 0


LOCKED: dict[str, Callable[[Path], Path]] = {
    "a shard": lambda run: newest(run) / SHARD,
    "a manifest": lambda run: newest(run) / "manifest.json",
    "a checkpoint": newest,
    "all checkpoints": lambda run: run / "checkpoints",
}


@pytest.mark.parametrize("what", LOCKED)
def test_a_rank_stops_where_permissions_forbid_it_to_read(run: Path, what: str) -> None:
    LOCKED[what](run).chmod(0)
    code, said = run_powerless(lambda: search(run))
    assert (code, said) == (ExitCode.ENVIRONMENT, "")
    (run / "checkpoints").chmod(0o755)
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("what", LOCKED)
@pytest.mark.parametrize("words", [("checkpoint", "verify"), ("checkpoint", "ls", "--verify")])
def test_commands_say_so_and_exit_with_4(
    run: Path, what: str, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    LOCKED[what](run).chmod(0)
    code, said = run_powerless(lambda: command(*words, run))
    assert (code, said) == (ExitCode.ENVIRONMENT, "")
    shown = capfd.readouterr()
    assert "Permission denied" in shown.out + shown.err
    assert "DAMAGED" not in shown.out and "fix: " in shown.err


def test_the_launcher_stops_before_any_rank_starts(run: Path) -> None:
    newest(run).chmod(0)

    def start() -> int:
        with pytest.raises(UserError, match=r"manifest.json: Permission denied") as caught:
            validate_resume(plan_of(run))
        return int(caught.value.code)

    assert run_powerless(start) == (ExitCode.ENVIRONMENT, "")


def test_a_disk_that_fails_to_read_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable_files.hashlib, "file_digest", fail)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"cannot be read: Input/output error") as caught:
            find_good(run / "checkpoints", World.joined(), verify=True, tell=lambda path, why: None)
    finally:
        dist.destroy_process_group()
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert "it was not set aside" in caught.value.why
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("what", ["all checkpoints", "a checkpoint"])
def test_a_link_to_a_disk_that_is_not_mounted_is_not_empty(run: Path, what: str) -> None:
    place = LOCKED[what](run)
    place.rename(run.parent / "elsewhere")
    place.symlink_to("/nowhere/at/all")
    with pytest.raises(UserError, match=r"cannot be read: .*No such file") as caught:
        validate_resume(plan_of(run))
    assert caught.value.code == ExitCode.ENVIRONMENT


def test_a_report_says_what_it_could_not_read(run: Path) -> None:
    (run / "checkpoints").rename(run / "moved")
    (run / "checkpoints").symlink_to("/nowhere/at/all")
    found = collect_run(run)
    assert found.checkpoints == ()
    assert any("checkpoints cannot be read" in note for note in found.notes)


def test_no_run_begins_over_checkpoints_that_are_not_good(run: Path) -> None:
    for step in STEPS:
        (run / "checkpoints" / f"step-{step:08d}" / SHARD).write_bytes(b"short")
    with pytest.raises(UserError, match="none of them is good") as caught:
        validate_resume(plan_of(run))
    assert caught.value.code == ExitCode.VERIFY_FAILED
    assert f"step-00000004: {SHARD}: has 5 bytes, 4096 were written" in caught.value.what
    assert "checkpoint.begin_anew=true" in caught.value.fix
    assert "name=demo-2" in caught.value.fix
    validate_resume(plan_of(run, "checkpoint.begin_anew=true"))
    # What an earlier start has set aside counts as well.
    for step in STEPS:
        quarantine(run / "checkpoints" / f"step-{step:08d}", [f"{SHARD}: was cut"])
    with pytest.raises(UserError, match=r"quarantined-step-00000002: rank-00000.bin: was cut"):
        validate_resume(plan_of(run))
    validate_resume(plan_of(run, "checkpoint.begin_anew=true"))
