"""A disk without room: every rank hears of it, what was saved stays, the space comes back."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, start

from commands import TIMEOUT_S, Command
from shardwise.checkpoint import durable_files, store
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.save import Progress, Saver
from shardwise.checkpoint.store import final_path, list_entries, quarantine
from shardwise.errors import ExitCode
from shardwise.metrics.events import EventLog, read_events
from shardwise.training.session import Session, build_loader
from shardwise.training.step import Stepper
from shardwise.units import format_bytes

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
NUMBERS = itertools.count()
SETTINGS: Settings = {"shard.strategy": "full_shard"}
# A checkpoint of these runs takes about 460 KiB.
ROOM_FOR_ONE, ROOM_FOR_MANY = "700k", "8m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that one checkpoint fits on, and a second one does not."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_FOR_ONE}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size={ROOM_FOR_MANY}", str(disk)], check=True)


def used_bytes(disk: Path) -> int:
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def states(root: Path) -> dict[str, str]:
    return {entry.path.name: entry.state for entry in list_entries(root)}


# ---- on the ranks ----------------------------------------------------------------------------


@cache
def session_of(root: Path) -> tuple[Session, Saver]:
    """Kept by the rank from one call to the next."""
    session = start(dist.get_world_size(), SETTINGS)
    return session, Saver(root, session.plan, session.model, session.optimizer, session.mesh.world)


def save(root: Path, step: int, trains_meanwhile: bool = False) -> str | None:
    """Save, perhaps with training going on beside it; returns the error."""
    session, saver = session_of(root)
    progress = Progress(step=step, position=step, tokens=0, loss=None, loss_scale=None)
    assert saver.start(progress) == []
    if trains_meanwhile:
        stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
        loader = build_loader(session)
        for index in range(2):
            stepper.run(loader.step_batches(index), 1e-3)
    (outcome,) = saver.finish()
    assert outcome.step == step
    return outcome.error


def save_with_faults(root: Path, faults: list[tuple[str, int, int]]) -> list[str | None]:
    """One save a fault: the `call`-th of `function` on one rank finds no room (-1: the last)."""
    save(root, 1)
    errors = []
    for number, (function, rank, call) in enumerate(faults):
        module = store if function == "rename" else durable_files
        real = getattr(module, function)
        if call < 0:
            counting = mock.Mock(side_effect=real)
            with mock.patch.object(module, function, counting):
                save(root / "counted", number)
            call += counting.call_count
        calls = iter(range(10**6))

        def fail(*args: Any, _calls: Any = calls, _at: int = call, _real: Any = real) -> Any:
            if next(_calls) == _at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return _real(*args)

        with mock.patch.object(module, function, fail if dist.get_rank() == rank else real):
            errors.append(save(root, 2))
        dist.barrier()
        assert not store.partial_path(root, 2).exists(), (function, rank, call)
        assert not final_path(root, 2).exists()
        dist.barrier()
    return errors


def save_beside_a_link(root: Path, other: Path) -> str | None:
    """Save the fourth of three that are kept, where the oldest is a link to another place."""
    save(other, 1)
    root.mkdir(exist_ok=True)
    final_path(root, 1).symlink_to(final_path(other, 1))
    for step in (2, 3):
        save(root, step)
    return save(root, 4)


# ---- tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_save_that_does_not_fit_costs_nothing_else(
    ranks: Pools, disk: Path, asynchronous: bool
) -> None:
    assert ranks(2).run(save, disk, 1, asynchronous) == [None, None]
    used = used_bytes(disk)
    for step in (2, 3):
        for error in ranks(2).run(save, disk, step, asynchronous):
            assert "No space left on device" in error
        assert states(disk) == {"step-00000001": "not verified"}
        assert check_checkpoint(final_path(disk, 1)) == []
        assert used_bytes(disk) == used
    make_room(disk)
    assert ranks(2).run(save, disk, 3, asynchronous) == [None, None]
    assert states(disk) == {"step-00000001": "not verified", "step-00000003": "not verified"}
    assert check_checkpoint(final_path(disk, 3)) == []


def test_wherever_the_room_ends(ranks: Pools, tmp_path: Path) -> None:
    """At the first, a middle and the last write of each rank, in fsync and in the rename."""
    faults = [("write_all", rank, call) for rank in (0, 1) for call in (0, 1, 20, -1)]
    faults += [("write_all", 0, -2), ("write_all", 0, -3)]
    faults += [("sync_handle", 0, 0), ("sync_handle", 1, 0), ("sync_handle", 0, 2)]
    faults += [("rename", 0, 0)]
    for errors in ranks(2).run(save_with_faults, tmp_path, faults):
        for (function, rank, call), error in zip(faults, errors, strict=True):
            assert error is not None, (function, rank, call)
            assert error.startswith(f"rank {rank}: OSError: [Errno 28] No space left"), error
    assert states(tmp_path) == {"step-00000001": "not verified"}
    assert check_checkpoint(final_path(tmp_path, 1)) == []
    assert ranks(2).run(save, tmp_path, 2) == [None, None]
    assert check_checkpoint(final_path(tmp_path, 2)) == []


def test_a_published_save_is_not_reported_as_failed(ranks: Pools, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (error,) = ranks(1).run(save_beside_a_link, root, tmp_path / "other")
    assert check_checkpoint(final_path(root, 4)) == []
    assert error is None


def test_a_damaged_checkpoint_is_set_aside_without_room(disk: Path) -> None:
    path = final_path(disk, 1)
    path.mkdir()
    with pytest.raises(OSError, match="No space left"), (disk / "ballast").open("wb", 0) as file:
        while True:
            file.write(bytes(4096))
    assert quarantine(path, ["manifest.json: cannot be read"]).is_dir()


def test_a_record_that_cannot_be_written_stops_no_training() -> None:
    said: list[str] = []
    with EventLog(Path("/dev/full"), enabled=True, say=said.append) as log:
        log.write("step", step=1)
        log.write("step", step=2)
    assert said == ["ALERT: full cannot be written: No space left on device"]


CONFIG = f"""\
model: {{name: tiny-llama, overrides: {json.dumps(SHAPE)}}}
data: {{source: synthetic, seq_len: 16}}
cluster: 2xCPU
shard: {{strategy: full_shard}}
train: {{steps: 80, global_batch: 4}}
checkpoint: {{every: 20, keep: 2}}
"""


class Training:
    """`shardwise train` on a disk that a ballast fills up."""

    def __init__(self, disk: Path, **settings: Any) -> None:
        self.disk, self.run_dir = disk, disk.parent
        config = self.run_dir.parent / "run.yaml"
        config.write_text(CONFIG)
        words = ["train", str(config), f"runs_dir={self.run_dir.parent}", "name=run"]
        words += [f"{name}={value}" for name, value in settings.items()]
        self._output = self.run_dir.parent / f"output-{next(NUMBERS)}"
        self._output.touch()
        self.process = Command(words, self._output)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def read_until(self, words: str) -> None:
        """Until it has said these words; to the end where it does not."""
        while words not in self.said and self.process.poll() is None:
            time.sleep(0.01)

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(TIMEOUT_S)

    def fill(self) -> None:
        """Leave no room for another checkpoint."""
        with suppress(OSError), (self.disk / "ballast").open("wb", 0) as file:
            while True:
                file.write(bytes(65536))

    def empty(self) -> None:
        """Make room again."""
        (self.disk / "ballast").unlink()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Of these kinds, in order."""
        events = read_events(self.run_dir / "events.jsonl")
        return [event for event in events if event["event"] in kinds]


@pytest.mark.long
@pytest.mark.slow
def test_training_waits_for_room_and_goes_on(disk: Path) -> None:
    make_room(disk)
    training = Training(disk)
    training.read_until("saved step 20")
    training.fill()
    training.read_until("training waits up to 600 s for room")
    training.empty()
    assert training.finish() == 0, training.said
    assert "ALERT: step 40 was not saved: [Errno 28] No space left on device" in training.said
    assert [event["step"] for event in training.events("checkpoint_failed")] == [40, 60]
    assert [event["step"] for event in training.events("checkpoint")] == [20, 60, 80]
    assert set(states(disk).values()) == {"not verified"}
    assert check_checkpoint(final_path(disk, 80)) == []


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_and_nothing_is_trained_twice(disk: Path) -> None:
    make_room(disk)
    patience = {"checkpoint.wait_for_room_s": 1}
    training = Training(disk, **patience)
    training.read_until("saved step 20")
    training.fill()
    assert training.finish() == ExitCode.ENVIRONMENT, training.said
    tensors = read_index(final_path(disk, 20)).values()
    needed = sum(one.piece_bytes(piece) for one in tensors for piece in one.pieces)
    assert (
        f"step 60 cannot be saved: a checkpoint needs {format_bytes(needed)}, 0 B are free in "
        f"{disk}"
    ) in training.said
    assert training.events("restart") == []
    assert states(disk) == {"step-00000020": "not verified"}
    training.empty()
    again = Training(disk, **patience, **{"train.steps": 50})
    again.read_until("resumed at step 20")
    again.fill()
    # The last save fails too, and is no reason to train the steps before it again.
    assert again.finish() == ExitCode.ENVIRONMENT, again.said
    assert "cannot be saved" in again.said
    assert len(again.events("start")) == 2
    assert states(disk) == {"step-00000020": "not verified"}
