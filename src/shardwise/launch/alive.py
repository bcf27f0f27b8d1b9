"""The first actions of a rank. After them it can be watched, asked to stop, and made to dump its
stacks."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from shardwise.launch.guard import Guard
from shardwise.launch.node_path import node_place
from shardwise.launch.parent import launcher_of, leave_with_launcher
from shardwise.training.heartbeat import HEARTBEAT_VARIABLE, Heartbeat
from shardwise.training.signals import handle_stop_signals


def come_alive(environ: MutableMapping[str, str]) -> None:
    """Called once by a rank's process, before it imports torch, which takes seconds."""
    # Python turns Ctrl-C into an exception, which a library may swallow while it is imported.
    handle_stop_signals(signal.SIG_DFL)
    if launcher_of(environ) is not None or "TORCHELASTIC_RUN_ID" in environ:
        leave_with_launcher(environ)
    if HEARTBEAT_VARIABLE not in environ:
        folder = _own_folder(node_place(environ, "heartbeats"))
        if folder is None:
            return
        environ[HEARTBEAT_VARIABLE] = str(folder)
    folder = Path(environ[HEARTBEAT_VARIABLE])
    show_life(environ)
    Guard(folder, launcher_of(environ), dict(environ))


def show_life(environ: Mapping[str, str], timeout_s: float | None = None) -> None:
    """Leave a sign that the rank is importing, with its time limit as soon as that is known."""
    Heartbeat(int(environ["RANK"]), timeout_s=timeout_s, log=keep_stacks(environ), environ=environ)


def _own_folder(folder: Path | None) -> Path | None:
    """The folder, if only this user can write to it: its content decides which processes are
    killed."""
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
            return folder
    return None


def keep_stacks(environ: Mapping[str, str]) -> str:
    """Send the stacks of an aborted rank to a file instead of the console, until there is a log.
    Returns its path."""
    if HEARTBEAT_VARIABLE not in environ:
        return ""
    path = Path(environ[HEARTBEAT_VARIABLE], f"stacks-{environ['RANK']}-{os.getpid()}")
    try:
        file = path.open("w", encoding="utf-8")
    except OSError:
        return ""
    # The handler keeps the file open.
    faulthandler.enable(file=file, all_threads=True)
    return str(path)
