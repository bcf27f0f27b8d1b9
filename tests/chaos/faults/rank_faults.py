"""Faults inside a rank of a real run. A file of a fault's name switches it on, its removal off."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint import durable_files
from shardwise.data.loader import BatchLoader
from shardwise.training import loop

# Steps are paced, so that their time does not depend on what else the machine does.
STEP_S = 0.4
SLOW_RANK, SLOW_S = 1, 0.2
THROTTLED_S = 0.4
SPIKE = 1000.0
# Longer than a step, so that reading ahead does not help.
READ_S = 0.8
# The one whose memory is exported.
FULL_RANK = 0


def install(folder: Path, rank: int) -> None:
    """Lay all of them in the way of this rank."""
    _slow_and_spoil_steps(folder, rank)
    _slow_reads(folder)
    _stall_and_fail_saves(folder)


def _slow_and_spoil_steps(folder: Path, rank: int) -> None:
    attach = loop.attach_training_loss
    met: float | None = None
    filling = b""

    def extra_s() -> float:
        slow = SLOW_S if rank == SLOW_RANK and (folder / "slow_rank").exists() else 0.0
        return slow + (THROTTLED_S if (folder / "throttled").exists() else 0.0)

    def attach_faulty(session: Any, say: Any) -> None:
        attach(session, say)
        sum_loss = session.model.sum_loss

        def faulty(*args: Any) -> Any:
            nonlocal met, filling
            is_full = rank == FULL_RANK and (folder / "full_memory").exists()
            filling = (filling or _fill(session.plan.cluster.memory_bytes)) if is_full else b""
            now = time.monotonic()
            time.sleep(max(0.0, (met or now) + STEP_S + extra_s() - now))
            loss = sum_loss(*args)
            # All ranks come out of the forward pass together: its last all-gather has them wait.
            met = time.monotonic()
            if (folder / "nonfinite").exists():
                loss = loss * float("nan")
            if (folder / "gradient_spike").exists():
                loss = SPIKE * loss - (SPIKE - 1) * loss.detach()
            return loss

        session.model.sum_loss = faulty

    loop.attach_training_loss = attach_faulty


def _fill(capacity: int) -> bytes:
    """As much as this process is short of holding `capacity`, written to and so resident."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return b"\1" * max(0, capacity - pages * os.sysconf("SC_PAGE_SIZE"))


def _slow_reads(folder: Path) -> None:
    """From the batch on that the switch names. A rank that began with an earlier one would be late
    by a read for good, and the others would wait for it instead of for data."""
    read = BatchLoader.step_batches

    def slow(loader: BatchLoader, index: int) -> Any:
        with suppress(FileNotFoundError, ValueError):
            if index >= int((folder / "slow_data").read_text(encoding="utf-8")):
                time.sleep(READ_S)
        return read(loader, index)

    BatchLoader.step_batches = slow


def _stall_and_fail_saves(folder: Path) -> None:
    write = durable_files.write_all

    def faulty(*args: Any) -> None:
        if (folder / "failing_save").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        while (folder / "stalled_save").exists():
            time.sleep(0.05)
        write(*args)

    durable_files.write_all = faulty
