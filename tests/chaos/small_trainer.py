"""A trainer without a model: launcher, rank, events and checkpoints through the real functions.

It starts in milliseconds, so that hundreds of starts, kills and stops fit into a test.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from shardwise.checkpoint.durable_files import write_file
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.store import (
    begin,
    clear_partials,
    list_checkpoints,
    outdated,
    publish,
    remove,
)
from shardwise.errors import ExitCode, UserError
from shardwise.lease import holder_record, take
from shardwise.lease.lease import Lease, LostLease, inherit_lease, renewed
from shardwise.metrics.events import EventLog
from shardwise.training.heartbeat import birth_of

KEEP, EVERY = 2, 3
# What every plan has.
NO_MODEL = b'{"config": {}, "hf_config": {}, "choices": {}}'
STEP_S = 0.002
RESTARTS = 2
# Short, so that a stop can outlast it: used by trainers that play different hosts.
LEASE_S, RENEW_S = 0.4, 0.05
# How long those of one host wait for a rank whose launcher is gone.
ORPHANS_S = 1.0
_PR_SET_PDEATHSIG = 1


def launch(run_dir: Path, writer: str, *, own_host: bool) -> None:
    """What `shardwise train` does: take the directory, start a rank, start it again if killed."""
    os.setpgrp()
    _say_into(run_dir, writer)
    if own_host:
        _play_host(writer)
    patience_s = LEASE_S if own_host else ORPHANS_S
    try:
        with take.hold_run(run_dir, patience_s=patience_s, say=_say) as lease:
            code = _supervise(run_dir, writer, lease)
    except UserError as error:
        _say(f"error: {error}")
        code = int(error.code)
    sys.exit(code)


def _supervise(run_dir: Path, writer: str, lease: Lease) -> int:
    for _ in range(1 + RESTARTS):
        lease.validate()
        rank = os.fork()
        if rank == 0:
            os._exit(_live(run_dir, writer, inherit_lease(run_dir, lease.variables)))
        signal.signal(signal.SIGTERM, functools.partial(_pass_on, rank))
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        if code >= 0:
            return code
    return int(ExitCode.WORKER_DIED)


def _pass_on(rank: int, number: int, frame: FrameType | None) -> None:
    with suppress(ProcessLookupError):
        os.kill(rank, number)


def _live(run_dir: Path, writer: str, lease: Lease | None) -> int:
    """Steps and saves until it is asked to stop; returns the exit code."""
    assert lease is not None
    # A session of its own, as real ranks have: in the launcher's the kernel would hang up and wake
    # a rank that is stopped when the launcher dies.
    os.setsid()
    with run_dir.with_name(f"{writer}.ranks").open("a") as file:
        file.write(f"{os.getpid()} {birth_of(os.getpid())}\n")
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    root = run_dir / "checkpoints"
    events = EventLog(run_dir / "events.jsonl", enabled=True, fence=lease)
    with renewed(lease, RENEW_S), events:
        clear_partials(root)
        found = list_checkpoints(root)
        step = resumed = found[-1].step if found else 0
        try:
            while not asked:
                step += 1
                events.write("step", step=step, writer=writer)
                if not lease.lost:
                    _note(run_dir, f"{writer} event")
                if step % EVERY == 0:
                    _save(run_dir, step, writer, lease)
                time.sleep(STEP_S)
            # Whoever is asked to stop before the first step has nothing new to save.
            if step % EVERY and step > resumed:
                _save(run_dir, step, writer, lease)
        except LostLease as error:
            _say(f"error: {error}")
            return int(error.code)
        except FileNotFoundError:
            # Its save was cleared away between its last look at the lease and the rename.
            _say("lost while it published")
            return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.PREEMPTED)


def _save(run_dir: Path, step: int, writer: str, lease: Lease) -> None:
    root = run_dir / "checkpoints"
    shard = write_file(begin(root, step, lease) / "rank-00000.bin", os.urandom(64))
    manifest = Manifest(
        **{"step": step, "position": step, "tokens": step, "loss": None, "global_batch": 1},
        **{"seed": 0, "world_size": 1, "loss_scale": None, "versions": {}, "created": time.time()},
        files={"rank-00000.bin": shard},
    )
    publish(root, manifest, b"{}", NO_MODEL, lease)
    _note(run_dir, f"{writer} published {step}")
    lease.validate()
    remove(root, outdated(root, KEEP))
    _say(f"saved step {step}")


def _note(run_dir: Path, text: str) -> None:
    """By whom something was written, in an order that owes nothing to the lock."""
    trail = os.open(run_dir.with_suffix(".trail"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(trail, f"{text}\n".encode())
    os.close(trail)


def _say_into(run_dir: Path, writer: str) -> None:
    output = os.open(run_dir.with_name(f"{writer}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _play_host(name: str) -> None:
    """A machine of its own on a file system whose locks end at the machine."""
    socket.gethostname = lambda: name  # type: ignore[assignment]
    holder_record.this_kernel = take.this_kernel = lambda: name  # type: ignore[attr-defined]
    fcntl.flock = lambda *_: None  # type: ignore[assignment]
    take.renewed = functools.partial(renewed, every_s=RENEW_S)  # type: ignore[attr-defined]
