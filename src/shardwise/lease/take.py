"""Take a run directory, or report who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.lease.holder_record import (
    FOLDER,
    LeaseRecord,
    newest_record,
    own_record,
    record_path,
    remove_older,
    this_kernel,
)
from shardwise.lease.holders import lock_holders
from shardwise.lease.lease import LEASE_S, Lease, renewed

Say = Callable[[str], None]
LOCK_NAME = "held"
# A job that is about to end, or that only looks, releases the lock within moments.
_SETTLE_S = 0.5
_POLL_S = 0.1
# File systems and mounts without locks answer with one of these.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class Held(UserError):
    """Another job has the run directory."""


def _say_nothing(text: str) -> None:
    """For callers that do not tell the user that they wait."""


@contextmanager
def hold_run(
    run_dir: Path, *, patience_s: float = LEASE_S, say: Say = _say_nothing
) -> Iterator[Lease]:
    """Hold `run_dir` while the block runs. Raises `Held` where another job has it.

    `patience_s` is how long to wait for ranks that outlive their launcher, and for a sign of life
    of a holder on another host. With 0 such a holder is taken to be alive.
    """
    lease = take_lease(run_dir, patience_s, say)
    try:
        with renewed(lease):
            yield lease
    finally:
        lease.release()


def take_lease(run_dir: Path, patience_s: float, say: Say) -> Lease:
    """The lease on `run_dir`, with a higher epoch than any before it."""
    path = run_dir / FOLDER / LOCK_NAME
    with _explained(run_dir):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        is_locked = _lock(lock, path, patience_s, say)
        if not is_locked:
            say(
                f"the file system of {run_dir} has no locks: only the holder's heartbeat keeps "
                "other jobs out"
            )
        before = newest_record(run_dir)
        # On one kernel the lock is proof that the holder of an older record is gone.
        if before is not None and not (is_locked and before.kernel == this_kernel()):
            before = _watch(run_dir, before, patience_s, say)
        record = own_record(before.epoch + 1 if before else 1)
        with _explained(run_dir):
            return Lease(run_dir, lock, _claim(run_dir, record), record)
    except BaseException:
        os.close(lock)
        raise


@contextmanager
def _explained(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run directory {run_dir} cannot be written: {error.strerror}",
            fix="make it writable, or choose another place with runs_dir=DIRECTORY",
            code=ExitCode.ENVIRONMENT,
        ) from error


def _lock(lock: int, path: Path, patience_s: float, say: Say) -> bool:
    """Take the kernel's lock; false where the file system has none."""
    started = time.monotonic()
    # When looks began to find no rank that may still end; a busy machine takes long for one look.
    held_since: float | None = None
    has_told = False
    while True:
        tried = time.monotonic()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        record, pids = newest_record(path.parent.parent), lock_holders(path)
        # These are ranks whose launcher died: they save and exit.
        orphans = pids if record is not None and record.pid not in pids else []
        is_held = held_since is not None and tried - held_since > _SETTLE_S
        if (is_held and not orphans) or tried - started > max(_SETTLE_S, patience_s):
            raise _held(path.parent.parent, record, orphans)
        held_since = None if orphans else held_since or time.monotonic()
        if orphans and not has_told and tried - started > _SETTLE_S:
            has_told = True
            say(f"waiting for processes {_listed(orphans)}, whose launcher is gone, to end")
        time.sleep(_POLL_S)


def _watch(run_dir: Path, before: LeaseRecord, patience_s: float, say: Say) -> LeaseRecord:
    """The record, once it is released or unchanged for `patience_s` by this host's clock."""
    if before.released:
        return before
    if patience_s <= 0:
        raise _held(run_dir, before, [])
    say(
        f"{run_dir} was in use by process {before.pid} on {before.host}: looking for a sign of "
        f"life for {patience_s:.0f} s"
    )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = newest_record(run_dir)
        if now is not None and now.released:
            return now
        if now is not None and (now.epoch, now.beat) != (before.epoch, before.beat):
            raise _held(run_dir, now, [])
    return before


def _claim(run_dir: Path, record: LeaseRecord) -> int:
    """Create the record, which only one job can do. Earlier holders have then lost the
    directory."""
    path = record_path(run_dir, record.epoch)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise _held(run_dir, newest_record(run_dir), []) from None
    os.pwrite(handle, record.to_bytes(), 0)
    os.fsync(handle)
    newest = newest_record(run_dir)
    if newest is not None and newest.epoch > record.epoch:
        # Other jobs have come and gone since this job looked.
        os.close(handle)
        path.unlink(missing_ok=True)
        raise _held(run_dir, newest, [])
    remove_older(run_dir, record.epoch)
    return handle


def _held(run_dir: Path, record: LeaseRecord | None, orphans: list[int]) -> Held:
    other = f"give this run another name, such as name={run_dir.name}-2"
    if orphans:
        here = record.host if record is not None else "this host"
        return Held(
            f"{run_dir} is in use by processes {_listed(orphans)} on {here}, whose launcher is "
            "gone",
            why="they were told to save and exit when it died, and have not ended yet",
            fix=f"wait for them, end them with `kill -9 {' '.join(map(str, orphans))}`, or {other}",
            code=ExitCode.ENVIRONMENT,
        )
    if record is None or not record.pid:
        who, stop = "a process that has left no name", "wait until it ends"
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
        who = f"process {record.pid} on {record.host}, since {since}"
        stop = f"wait until it ends, stop it with `kill {record.pid}` on {record.host}"
    return Held(
        f"{run_dir} is in use by another job: {who}",
        why="two jobs in one run directory would mix their events and checkpoints",
        fix=f"{stop}, or {other}",
        code=ExitCode.ENVIRONMENT,
    )


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
