"""One job at a time in a run directory, with real processes and the kernel's own locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from shardwise.checkpoint import store
from shardwise.checkpoint.store import begin, clear_partials, list_entries
from shardwise.errors import ExitCode
from shardwise.lease import take
from shardwise.lease.holder_record import FOLDER, newest_record, own_record, record_path
from shardwise.lease.lease import Lease, LostLease, inherit_lease, renewed
from shardwise.lease.take import Held, hold_run, take_lease
from shardwise.metrics.events import EventLog, read_events

HOLD = """
import subprocess, sys, time
from pathlib import Path
from shardwise.lease.take import hold_run
with hold_run(Path(sys.argv[1])) as lease:
    words = [sys.executable, "-c", "import time; print('in', flush=True); time.sleep(600)"]
    if sys.argv[2] == "child":
        subprocess.Popen(words, pass_fds=lease.handles)
    else:
        print("in", flush=True)
    time.sleep(600)
"""
Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts processes that hold a run directory, in a group that ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str = "alone") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLD, str(tmp_path / "run"), kind]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def refused(run_dir: Path, patience_s: float = 0.0) -> Held:
    with pytest.raises(Held) as caught, hold_run(run_dir, patience_s=patience_s):
        pass
    return caught.value


def held_elsewhere(run_dir: Path) -> Lease:
    """A lease of a job on another host, where this host's locks are not seen."""
    epoch = (found.epoch if (found := newest_record(run_dir)) else 0) + 1
    record = replace(own_record(epoch), host="node-7", kernel="another", pid=4242)
    path = record_path(run_dir, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record.to_bytes())
    return Lease(run_dir, os.open(os.devnull, os.O_RDONLY), os.open(path, os.O_RDWR), record)


def test_the_second_job_is_refused_and_told_who_has_it(hold: Hold, tmp_path: Path) -> None:
    holder = hold()
    refusal = refused(tmp_path / "run", patience_s=20)
    assert refusal.code == ExitCode.ENVIRONMENT
    who = f"process {holder.pid} on {socket.gethostname()}, since {time.strftime('%Y-')}"
    assert f"{tmp_path / 'run'} is in use by another job: {who}" in refusal.what
    assert f"`kill {holder.pid}` on {socket.gethostname()}" in refusal.fix
    assert "name=run-2" in refusal.fix


def test_a_killed_job_leaves_no_lock(hold: Hold, tmp_path: Path) -> None:
    holder = hold()
    holder.kill()
    holder.wait()
    with hold_run(tmp_path / "run") as lease:
        assert lease.epoch == 2


def test_a_stopped_job_keeps_it(hold: Hold, tmp_path: Path) -> None:
    holder = hold()
    holder.send_signal(signal.SIGSTOP)
    assert str(holder.pid) in refused(tmp_path / "run", patience_s=20).what


def test_children_hold_it_when_the_launcher_is_gone(hold: Hold, tmp_path: Path) -> None:
    holder = hold("child")
    holder.kill()
    holder.wait()
    said: list[str] = []
    with pytest.raises(Held) as caught:
        take_lease(tmp_path / "run", 1.0, said.append)
    child = int(re.findall(r"kill -9 (\d+)`", caught.value.fix)[0])
    assert "whose launcher is gone" in caught.value.what
    assert said == [f"waiting for processes {child}, whose launcher is gone, to end"]
    threading.Timer(0.7, os.kill, (child, signal.SIGKILL)).start()
    with hold_run(tmp_path / "run") as lease:
        assert lease.epoch == 2


def test_a_child_that_ends_between_two_looks_is_not_taken_for_another_job(
    hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = hold("child")
    holder.kill()
    holder.wait()
    real, started = take.lock_holders, time.monotonic()

    def look(path: Path) -> list[int]:
        """Slow, as on a busy machine."""
        time.sleep(0.6)
        if time.monotonic() - started < 1.0:
            return real(path)
        os.killpg(holder.pid, signal.SIGKILL)
        return []

    monkeypatch.setattr(take, "lock_holders", look)
    with hold_run(tmp_path / "run") as lease:
        assert lease.epoch == 2


def test_a_directory_is_free_again_at_once(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        with hold_run(tmp_path, patience_s=0) as lease:
            assert lease.epoch == epoch
        found = newest_record(tmp_path)
        assert found is not None and found.released
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["epoch-3", "held"]


def test_a_child_shares_the_lease(tmp_path: Path) -> None:
    with hold_run(tmp_path) as lease:
        copies = [os.dup(handle) for handle in lease.handles]
        shared = inherit_lease(tmp_path, {"SHARDWISE_LEASE": f"{copies[0]}:{copies[1]}"})
        assert shared is not None
        assert shared.epoch == lease.epoch == 1
        shared.renew()
        shared.close()
        assert str(os.getpid()) in refused(tmp_path).what
    assert inherit_lease(tmp_path, {}) is None


def test_a_job_on_another_host_that_lives_is_left_alone(tmp_path: Path) -> None:
    """Its locks are not seen here: its record changes, and that is enough."""
    elsewhere = held_elsewhere(tmp_path)
    with renewed(elsewhere, every_s=0.1):
        refusal = refused(tmp_path, patience_s=30)
    assert "process 4242 on node-7" in refusal.what
    assert "`kill 4242` on node-7" in refusal.fix
    elsewhere.validate()


def test_a_job_on_another_host_that_died_is_followed(tmp_path: Path) -> None:
    elsewhere = held_elsewhere(tmp_path)
    assert "node-7" in refused(tmp_path, patience_s=0).what
    said: list[str] = []
    with hold_run(tmp_path, patience_s=0.5, say=said.append) as lease:
        assert lease.epoch == 2
        assert "process 4242 on node-7" in said[0]
        with pytest.raises(LostLease, match="has lost the run directory"):
            elsewhere.renew()
        assert elsewhere.lost


def test_a_job_on_another_host_that_ended_needs_no_wait(tmp_path: Path) -> None:
    held_elsewhere(tmp_path).release()
    with hold_run(tmp_path, patience_s=0) as lease:
        assert lease.epoch == 2


def test_a_record_cut_off_by_a_crash_is_waited_for(tmp_path: Path) -> None:
    held_elsewhere(tmp_path)
    record_path(tmp_path, 1).write_bytes(b'{"epoch": 1, "ho')
    assert "left no name" in refused(tmp_path, patience_s=0).what
    with hold_run(tmp_path, patience_s=0.3) as lease:
        assert lease.epoch == 2


def test_without_locks_the_record_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said: list[str] = []
    with hold_run(tmp_path, say=said.append):
        assert "has no locks" in said[0]
        assert str(os.getpid()) in refused(tmp_path, patience_s=30).what
    with hold_run(tmp_path, patience_s=0) as lease:
        assert lease.epoch == 2


def test_only_one_of_many_takes_it_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exclusive creation decides, however their steps are interleaved."""
    monkeypatch.setattr(take, "_lock", lambda *_: False)
    for number in range(20):
        run_dir, start = tmp_path / str(number), threading.Barrier(4)
        taken: list[Lease] = []

        def contend(
            run_dir: Path = run_dir,
            start: threading.Barrier = start,
            taken: list[Lease] = taken,
        ) -> None:
            start.wait()
            try:
                taken.append(take_lease(run_dir, 0, lambda _: None))
            except Held:
                return

        threads = [threading.Thread(target=contend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        taken[0].validate()


def test_who_looked_long_ago_does_not_take_an_old_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the records and its claim others have come and gone."""
    real = own_record

    def later(epoch: int) -> object:
        monkeypatch.setattr(take, "own_record", real)
        monkeypatch.setattr(take, "_lock", lambda *_: True)
        for _ in range(2):
            with hold_run(tmp_path):
                pass
        return real(epoch)

    monkeypatch.setattr(take, "own_record", later)
    with pytest.raises(Held):
        take_lease(tmp_path, 0, lambda _: None)
    found = newest_record(tmp_path)
    assert found is not None and found.epoch == 2


def test_a_removed_lock_is_a_lost_one(tmp_path: Path) -> None:
    with hold_run(tmp_path) as lease:
        for path in (tmp_path / FOLDER).iterdir():
            path.unlink()
        with hold_run(tmp_path) as other:
            assert other.epoch == lease.epoch == 1
            with pytest.raises(LostLease):
                lease.validate()
            other.validate()


def test_who_lost_it_can_publish_nothing(tmp_path: Path) -> None:
    stale, root = held_elsewhere(tmp_path), tmp_path / "checkpoints"
    make_checkpoint(root, 1, fence=stale)
    with (
        hold_run(tmp_path, patience_s=0.3),
        EventLog(tmp_path / "events.jsonl", enabled=True, fence=stale) as log,
    ):
        with pytest.raises(LostLease):
            make_checkpoint(root, 2, fence=stale)
        log.write("step", step=2)
    assert [entry.path.name for entry in list_entries(root)] == ["step-00000001"]
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_rename_that_was_under_way_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is stopped after its last look at the lease, and wakes when the next one saves."""
    stale, root = held_elsewhere(tmp_path), tmp_path / "checkpoints"
    real = store.rename

    def stopped_before(source: Path, target: Path) -> None:
        with hold_run(tmp_path, patience_s=0.3) as lease:
            clear_partials(root)
            begin(root, 7, lease)
            real(source, target)

    monkeypatch.setattr(store, "rename", stopped_before)
    with pytest.raises(FileNotFoundError):
        make_checkpoint(root, 7, fence=stale)
    assert [entry.path.name for entry in list_entries(root)] == ["partial-step-00000007.2"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written"), hold_run(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"3", b"[" * 400, b"{}", b'{"epoch": ' + b"9" * 400),
        json.dumps(asdict(own_record(3)) | {"pid": "1; reboot", "since": []}).encode(),
    ],
)
def test_a_record_that_cannot_be_read_names_nobody(tmp_path: Path, data: bytes) -> None:
    path = record_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(data)
    found = newest_record(tmp_path)
    assert found is not None and (found.epoch, found.pid, found.host) == (3, 0, "an unknown host")
