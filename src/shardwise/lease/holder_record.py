"""The record of a run directory's holder, in a file that only the holder can have created.

A run directory has one record for each time that it was taken: `.lock/epoch-7` for the seventh. The
file is created exclusively, which file systems guarantee between hosts too, so two jobs never have
the same epoch. The next holder removes the older records, and a job whose record is gone has lost
the directory.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shardwise.files import parse_json, read_bytes

FOLDER = ".lock"
# Records have one size and are overwritten in place. A disk writes a sector whole or not at all.
_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One holding of the run directory."""

    epoch: int
    """Counts up with every holding: the fencing token."""

    host: str
    kernel: str
    """Which boot of which machine: processes of one kernel see each other's locks."""

    pid: int
    since: float
    """Seconds by the holder's clock, for people only: clocks of hosts are never compared."""

    beat: int
    """Changes for as long as the holder lives."""

    released: bool = False

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps(asdict(self)).encode().ljust(_BYTES - 1) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaseRecord:
        """The inverse of `to_bytes`; ValueError or TypeError where it is not a record."""
        record = cls(**parse_json(data))
        for item in fields(cls):
            if type(getattr(record, item.name)).__name__ != item.type:
                raise TypeError(f"{item.name} is no {item.type}")
        return record


def own_record(epoch: int) -> LeaseRecord:
    """The record of this process."""
    return LeaseRecord(
        epoch=epoch,
        # Room for any name that DNS allows would not leave room for the rest.
        host=socket.gethostname()[:64],
        kernel=this_kernel(),
        pid=os.getpid(),
        since=time.time(),
        beat=time.monotonic_ns(),
    )


def this_kernel() -> str:
    """The boot id; all containers of a machine share it, as they share the kernel's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def record_path(run_dir: Path, epoch: int) -> Path:
    """Where the record of `epoch` is."""
    return run_dir / FOLDER / f"epoch-{epoch}"


def newest_record(run_dir: Path) -> LeaseRecord | None:
    """The record with the highest epoch; None where the directory was never taken."""
    epochs = _epochs(run_dir)
    return _read(run_dir, max(epochs)) if epochs else None


def remove_older(run_dir: Path, epoch: int) -> None:
    """Remove older records, so that earlier holders know that they have lost the directory."""
    for older in _epochs(run_dir):
        if older < epoch:
            with suppress(FileNotFoundError):
                record_path(run_dir, older).unlink()


def _epochs(run_dir: Path) -> list[int]:
    names = (path.name.removeprefix("epoch-") for path in (run_dir / FOLDER).glob("epoch-*"))
    return [int(name) for name in names if name.isdecimal()]


def _read(run_dir: Path, epoch: int) -> LeaseRecord:
    """A record. One that cannot be read (yet) belongs to a holder of whom nothing is known."""
    path = record_path(run_dir, epoch)
    unknown = LeaseRecord(epoch=epoch, host="an unknown host", kernel="", pid=0, since=0.0, beat=0)
    try:
        found = LeaseRecord.from_bytes(read_bytes(path, _BYTES))
    except (FileNotFoundError, ValueError, TypeError):
        return unknown
    return found if found.epoch == epoch else unknown
