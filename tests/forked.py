"""Launchers and ranks that are forked off instead of started, so that none has to import torch.

The code is that of the commands: `shardwise train`, `shardwise torchrun` and torchrun itself. Only
what starts a Python process forks one instead, which then runs the module that the command names.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import typer.main
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler as of_torchrun,
)
from transformers import dynamic_module_utils

import one_parser  # noqa: F401  (before the parser is made)
from shardwise.checkpoint import durable_files, save
from shardwise.cli.main import app, main
from shardwise.launch import holding, identity, lookout, ranks, this_machine, worker
from shardwise.lease import take
from shardwise.metrics.events import EventLog
from signalled import Signalled

# How long a start waits for ranks whose launcher is gone.
PATIENCE_S = 2.0


def shardwise(words: Sequence[str]) -> None:
    """What the console script calls."""
    sys.argv = ["shardwise", *words]
    main()


def plain_torchrun(words: Sequence[str]) -> None:
    """What torchrun's console script calls, with each rank a `shardwise`."""
    torchrun.main([*_ON_THIS_NODE, "--max-restarts", "3", "-m", "shardwise", *words])


def agent(words: Sequence[str]) -> None:
    """`shardwise torchrun`."""
    shardwise(["torchrun", *_ON_THIS_NODE, "--max-restarts", "3", "-m", "shardwise", *words])


_ON_THIS_NODE = ("--standalone", "--nproc-per-node", "2")
LAUNCHERS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "shardwise": shardwise,
    "torchrun": plain_torchrun,
    "shardwise torchrun": agent,
}


def launch(kind: str, words: Sequence[str], output: Path, writer: str, folder: Path) -> None:
    """In a process of its own: be this launcher. `folder` takes the trail of all writes, and has
    the switches of faults."""
    os.setsid()
    _print_into(output, output)
    os.environ["OMP_NUM_THREADS"] = "1"
    _fork_ranks()
    this_machine.hold_run = holding.hold_run = partial(take.hold_run, patience_s=PATIENCE_S)  # type: ignore[attr-defined, assignment]
    _leave_trail(folder, writer)
    _be(lambda: LAUNCHERS[kind](words))


def command(
    module: str,
    words: Sequence[str],
    stdout: Path,
    stderr: Path,
    environ: Mapping[str, str],
    folder: str,
) -> None:
    """In a process of its own: be `python -m MODULE WORDS`, called in `folder`."""
    os.setsid()
    _print_into(stdout, stderr)
    os.chdir(folder)
    _fork_ranks()
    _run_module(module, words, environ)


def _print_into(stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _fork_ranks() -> None:
    """Let launchers of this process fork their ranks."""
    torch.set_num_threads(1)
    ranks.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[attr-defined]
    of_torchrun.Popen = Forked  # type: ignore[misc, assignment]
    lookout._rank_of = rank_of
    # A rank hashes the package that it runs. These ranks run the one that is imported here.
    identity._own_source = lambda: _SOURCE


def rank_of(pid: int) -> int | None:
    """The rank that a forked process is. The kernel shows the variables that a process was started
    with and not those that it has, so a rank puts its number into its name."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(name[5:]) if name.startswith("rank-") else None


class Forked(Signalled):
    """As much of subprocess.Popen as launchers use."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> None:
        assert start_new_session
        self.args = args
        self.returncode: int | None = None
        with _signals_held():
            ready, becoming = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                _become(args, env, {1: stdout, 2: stderr}, pass_fds)
            os.close(becoming)
            # `subprocess` too returns once the process is the program that launchers look for.
            os.read(ready, 1)
            os.close(ready)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


@contextmanager
def _signals_held() -> Iterator[None]:
    """Inside, signals with a handler are noted, and sent again afterwards.

    torchrun's handler raises, and Python drops what is raised in the functions that it calls around
    a fork: the signal would be lost. `subprocess` calls none of them.
    """
    heard: list[int] = []
    numbers = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for number in heard:
        os.kill(os.getpid(), number)


def _become(
    args: Sequence[str], env: Mapping[str, str], streams: Mapping[int, Any], kept: Sequence[int]
) -> NoReturn:
    """Be what `python -u -m MODULE ARGUMENTS` would be: signals, variables and open files too."""
    # What the parent holds must not be closed here by a collection: the numbers are used anew. Nor
    # must it be cleaned up at the end: the parent's directories are not ours.
    gc.freeze()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    # The parent's may be a notebook's.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
    for number, stream in streams.items():
        if stream is not None:
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
    Path("/proc/self/comm").write_text(f"rank-{env['RANK']}", encoding="utf-8")
    # This also tells the parent that the process has its name.
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)
    for number in kept:
        os.set_inheritable(number, True)
    at = args.index("-m")
    _run_module(args[at + 1], args[at + 2 :], env)


def _run_module(module: str, words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """With these variables, and with what PYTHONPATH has for the start of Python."""
    os.environ.clear()
    os.environ.update(environ)
    if "HF_MODULES_CACHE" in environ:
        # transformers read it when the server imported it, and all tests would share one folder.
        dynamic_module_utils.HF_MODULES_CACHE = environ["HF_MODULES_CACHE"]
    sys.argv = [module, *words]
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = folders

    def run() -> None:
        custom = (Path(folder, "sitecustomize.py") for folder in folders)
        if file := next(filter(Path.exists, custom), None):
            runpy.run_path(str(file))
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    _be(run)


def _be(program: Callable[[], object]) -> NoReturn:
    """Run it to its end, and end as Python would."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - whatever it is, this process ends by it
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _leave_trail(folder: Path, writer: str) -> None:
    """Every line of the record and every published checkpoint leaves a trace that owes nothing to
    the lock; writes of checkpoints fail while the disk is switched bad."""
    append, publish, write_all = EventLog.write, save.publish, durable_files.write_all

    def note(what: str) -> None:
        # Opened each time: a rank closes what its launcher has open.
        trail = os.open(folder / "trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(trail, f"{writer} {what}\n".encode())
        os.close(trail)

    def write_and_note(log: EventLog, event: str, **fields: Any) -> None:
        append(log, event, **fields)
        if log._file is not None and not log._fence.lost:
            note(f"event {event} {fields.get('step', '-')}")

    def publish_and_note(*args: Any, **named: Any) -> Any:
        published = publish(*args, **named)
        note(f"published {published.step}")
        return published

    def write_on_bad_disk(*args: Any) -> None:
        with suppress(FileNotFoundError):
            number = int((folder / "bad_disk").read_text())
            raise OSError(number, os.strerror(number))
        write_all(*args)

    EventLog.write = write_and_note  # type: ignore[method-assign]
    save.publish = publish_and_note
    durable_files.write_all = write_on_bad_disk


# Made here, once for all that is forked off.
_SOURCE = identity._own_source()
typer.main.get_command(app)
assert worker is not None
