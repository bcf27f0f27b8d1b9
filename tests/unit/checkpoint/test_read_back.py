"""A save is read back from the disk before an older checkpoint goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from trained import open_saver, save, start_session

from shardwise.checkpoint import durable_files
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.store import list_entries
from shardwise.errors import ExitCode, UserError
from shardwise.training.rank_run import run
from shardwise.verify.judge import judge_run

Write = Callable[[int, memoryview], None]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flipping(write: Write, is_on: Callable[[], bool] = lambda: True) -> Write:
    """A disk that keeps all but one bit of what is written to it."""

    def flip(handle: int, data: memoryview) -> None:
        changed = bytearray(data)
        if changed and is_on():
            changed[len(changed) // 2] ^= 1
        write(handle, memoryview(changed))

    return flip


def states(root: Path) -> dict[int, str]:
    return {entry.step: entry.state for entry in list_entries(root)}


def test_good_ones_stay_while_the_disk_flips_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start_session(tmp_path, checkpoint={"keep": 2})
    root = session.plan.run_dir / "checkpoints"
    keeps_four = replace(session.plan.config.checkpoint, keep=4)
    config = replace(session.plan.config, checkpoint=keeps_four)
    saver = open_saver(session)
    saver.plan = replace(session.plan, config=config)
    for step in (1, 2, 3, 4):
        assert save(session, saver, step).error is None
    saver.close()

    saver = open_saver(session)
    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "write_all", flipping(durable_files.write_all))
        for step in (5, 6):
            outcome = save(session, saver, step)
            # Where each is read back, each is named; the last word need not say how.
            assert outcome.error is not None, "the disk did not hold what was written"
            assert "rank-00000.bin: its content has changed" in outcome.error
            assert "manifest.json: its content has changed" in outcome.error
    good = dict.fromkeys((1, 2, 3, 4), "not verified")
    assert states(root) == {**good, 5: "quarantined", 6: "quarantined"}
    assert not any(check_checkpoint(root / f"step-{step:08d}") for step in good)
    assert save(session, saver, 7).error is None
    assert [step for step, state in states(root).items() if state != "quarantined"] == [4, 7]
    saver.close()


def test_a_hurried_save_lets_nothing_go(tmp_path: Path) -> None:
    session = start_session(tmp_path, checkpoint={"keep": 1})
    saver = open_saver(session)
    assert save(session, saver, 1).error is None
    hurried = save(session, saver, 2, hurried=True)
    assert (hurried.error, hurried.check_s) == (None, 0.0)
    root = session.plan.run_dir / "checkpoints"
    assert list(states(root)) == [1, 2]
    assert save(session, saver, 3).check_s > 0
    assert list(states(root)) == [3]
    saver.close()


def test_what_cannot_be_read_back_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start_session(tmp_path, checkpoint={"keep": 1})
    saver = open_saver(session)
    assert save(session, saver, 1).error is None

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(durable_files.hashlib, "file_digest", fail)
        outcome = save(session, saver, 2)
    assert outcome.misread
    assert "cannot be read: Input/output error" in str(outcome.error)
    # A host that sees the new name late has nothing to read yet.
    with monkeypatch.context() as patched:
        patched.setattr("shardwise.checkpoint.save.plain_size", lambda path: None)
        outcome = save(session, saver, 3)
    assert outcome.misread
    assert "is not visible on this host" in str(outcome.error)
    root = session.plan.run_dir / "checkpoints"
    assert states(root) == dict.fromkeys((1, 2, 3), "not verified")
    # The second try reads the same files again. Only then the older ones go.
    assert save(session, saver, 3).error is None
    assert states(root) == {3: "not verified"}
    saver.close()


def test_the_disk_is_asked_and_not_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def advise(handle: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        asked.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    session = start_session(tmp_path)
    saver = open_saver(session)
    assert save(session, saver, 1).error is None
    saver.close()
    assert sorted(asked) == ["manifest.json", "plan.json", "rank-00000.bin", "tensors.json"]


def test_a_run_on_such_a_disk_goes_on_once_and_then_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start_session(
        tmp_path,
        train={"global_batch": 2, "steps": 8},
        checkpoint={"keep": 2, "every": 1},
        observe={"log_every": 1},
    )
    plan = session.plan
    root, said = plan.run_dir / "checkpoints", []
    plan.run_dir.mkdir(parents=True)

    def has_two() -> bool:
        with suppress(OSError):
            return len(list(root.glob("step-*"))) >= 2
        return False

    monkeypatch.setattr(durable_files, "write_all", flipping(durable_files.write_all, has_two))
    with pytest.raises(UserError, match=r"step 4 could not be saved: the disk") as caught:
        run(plan, said.append)
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert "mend the disk" in caught.value.fix
    alerts = [line for line in said if line.startswith("ALERT: ")]
    assert alerts[0].startswith("ALERT: step 3 was not saved: the disk does not hold what was")
    assert [step for step, state in states(root).items() if state == "not verified"] == [1, 2]
    assert not any(check_checkpoint(root / f"step-{step:08d}") for step in (1, 2))
    (gate,) = [gate for gate in judge_run(plan.run_dir) if gate.name == "checkpoints"]
    assert gate.verdict == "fail"
    assert "quarantined-step-00000003" in gate.figure
