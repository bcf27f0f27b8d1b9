"""A run directory that this job holds: renewed while the job lives, and asked before every publish.

The kernel's lock keeps other jobs of this machine out, and those of other hosts where the file
system carries locks between them. It ends with the last process that holds it, so that a kill
leaves nothing behind. Some file systems (Lustre with localflock, some NFS mounts) keep locks on one
host only. There the record decides: the holder changes it every few seconds, and a job on another
host takes the directory only after it has seen no change for the whole of `LEASE_S`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shardwise.errors import ExitCode, UserError
from shardwise.lease.holder_record import FOLDER, LeaseRecord, newest_record, record_path

LEASE_VARIABLE = "SHARDWISE_LEASE"
LEASE_S = 20.0
RENEW_S = 2.0


class Fence(Protocol):
    """What a writer asks before it publishes anything."""

    @property
    def epoch(self) -> int:
        """Part of the names of unfinished work, so that two holders never share a name."""

    @property
    def lost(self) -> bool:
        """Whether the directory is known to be another job's."""

    def validate(self) -> None:
        """Raise where the directory is another job's by now."""


class NoFence:
    """For writers that share their directory with nobody."""

    epoch = 0
    lost = False

    def validate(self) -> None:
        """Nothing can be lost."""


UNFENCED = NoFence()


class LostLease(UserError):
    """Another job has taken the run directory."""


class Lease:
    """The right to write into a run directory. Several processes of one job may share it."""

    def __init__(self, run_dir: Path, lock: int, handle: int, record: LeaseRecord) -> None:
        self.run_dir = run_dir
        self.lost = False
        self._lock = lock
        self._handle = handle
        self._record = record

    @property
    def epoch(self) -> int:
        """Higher than that of every holder before."""
        return self._record.epoch

    @property
    def handles(self) -> tuple[int, int]:
        """Open files that a child must inherit to hold the directory too."""
        return self._lock, self._handle

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which a child finds the handles."""
        return {LEASE_VARIABLE: f"{self._lock}:{self._handle}"}

    def validate(self) -> None:
        """Raise where the record at its place is not the one that this job has created."""
        if self.lost or not self._is_in_place():
            self.lost = True
            raise _lost(self.run_dir, newest_record(self.run_dir))

    def renew(self) -> None:
        """Show other hosts that the holder is alive."""
        self.validate()
        # One clock for all processes of the job, so that their records never look the same.
        self._write(replace(self._record, beat=time.monotonic_ns()))

    def release(self) -> None:
        """Record that the directory is free, then release the lock."""
        # If the record cannot be written, the next job on another host waits, and no more.
        with suppress(OSError, LostLease):
            self.validate()
            self._write(replace(self._record, released=True))
        self.close()

    def close(self) -> None:
        """Close the handles and write no record. A process that shares the lease with others calls
        this."""
        os.close(self._handle)
        os.close(self._lock)

    def _is_in_place(self) -> bool:
        """Whether the record is this job's. The file is opened each time, because NFS asks its
        server only when a file is opened."""
        try:
            found = os.open(record_path(self.run_dir, self.epoch), os.O_RDONLY)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise
        try:
            return os.path.sameopenfile(found, self._handle)
        except OSError as error:
            if error.errno == errno.ESTALE:
                return False
            raise
        finally:
            os.close(found)

    def _write(self, record: LeaseRecord) -> None:
        os.pwrite(self._handle, record.to_bytes(), 0)
        os.fsync(self._handle)


def inherit_lease(run_dir: Path, environ: Mapping[str, str] = os.environ) -> Lease | None:
    """The lease of the launcher that started this process; None where it has passed none on."""
    said = environ.get(LEASE_VARIABLE)
    if said is None:
        return None
    lock, handle = (int(number) for number in said.split(":"))
    for number in (lock, handle):
        # Processes that this one starts are no part of the job.
        os.set_inheritable(number, False)
    record = LeaseRecord.from_bytes(os.pread(handle, 4096, 0))
    return Lease(run_dir, lock, handle, record)


@contextmanager
def renewed(lease: Lease, every_s: float = RENEW_S) -> Iterator[Lease]:
    """Renew it from a thread while the block runs."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(every_s):
            try:
                lease.renew()
            except LostLease:
                return
            except OSError:
                # A full disk or a server that is away: the next time may be better.
                continue

    thread = threading.Thread(target=work, daemon=True, name="lease")
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        # It may wait for a file server that never answers.
        thread.join(every_s)


def _lost(run_dir: Path, now: LeaseRecord | None) -> LostLease:
    if now is None:
        why = f"{run_dir / FOLDER} was removed while this job ran"
    else:
        why = (
            f"process {now.pid} on {now.host} took it after this job had shown no sign of life "
            f"for {LEASE_S:.0f} s"
        )
    return LostLease(
        f"this job has lost the run directory {run_dir}",
        why=why,
        fix="the same command goes on from the newest checkpoint when no other job uses the "
        "directory",
        code=ExitCode.ENVIRONMENT,
    )
