"""A `shardwise` that schedulers can start, which forks the command off instead of importing torch.

The program is a few lines that pass words, variables and signals to a server, and its exit code
back. The server has torch imported. What it forks is the command, as in tests/forked.py. If the
program is killed, what was forked for it is killed too, as on a node that is lost.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from forkserver import forkserver

_LENGTH = struct.Struct("!I")
_CODE = struct.Struct("!i")
_LOOK_EVERY_S = 0.05
_TIMEOUT_S = 60.0

_PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, struct, sys
link = socket.socket(socket.AF_UNIX)
link.connect({place!r})
said = {{"words": sys.argv[1:], "environ": dict(os.environ), "folder": os.getcwd()}}
data = json.dumps(said | {{"pid": os.getpid()}}).encode()
link.sendall(struct.pack("!I", len(data)) + data)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: link.sendall(bytes([number])))
(code,) = struct.unpack("!i", link.recv(4, socket.MSG_WAITALL))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class StandIn:
    """The program and its server, while the block runs."""

    def __enter__(self) -> Self:
        # The address of a Unix socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="stand-in-"))
        place = str(self._folder / "socket")
        self.path = self._folder / "shardwise"
        self.path.write_text(_PROGRAM.format(python=sys.executable, place=place))
        self.path.chmod(0o755)
        # Made here, so that no program comes before the server.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place)
        listener.listen(64)
        self._server = forkserver().Process(target=serve, args=(listener,))
        self._server.start()
        listener.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.terminate()
        self._server.join(_TIMEOUT_S)
        shutil.rmtree(self._folder)


def serve(listener: socket.socket) -> None:
    """Fork a command for each program that calls, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    links: dict[int, socket.socket] = {}
    try:
        while True:
            ready, _, _ = select.select([listener, *links.values()], [], [], _LOOK_EVERY_S)
            for pid, link in list(links.items()):
                if link in ready:
                    _pass_on(pid, link)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with suppress(OSError):  # the program was killed
                        link.sendall(_CODE.pack(os.waitstatus_to_exitcode(status)))
                    links.pop(pid).close()
            if listener in ready:
                _answer(listener, links)
    finally:
        for pid in links:
            _kill_all(pid)


def _answer(listener: socket.socket, links: dict[int, socket.socket]) -> None:
    link, _ = listener.accept()
    link.settimeout(_TIMEOUT_S)
    try:
        (length,) = _LENGTH.unpack(link.recv(_LENGTH.size, socket.MSG_WAITALL))
        request = json.loads(link.recv(length, socket.MSG_WAITALL))
    except (OSError, ValueError, struct.error):  # killed before it had asked
        link.close()
        return
    pid = os.fork()
    if pid == 0:
        listener.close()
        for other in (link, *links.values()):
            other.close()
        _become(request)
    links[pid] = link


def _become(request: dict[str, object]) -> NoReturn:
    import forked

    gc.freeze()
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdout, stderr = (Path(f"/proc/{request['pid']}/fd/{number}") for number in (1, 2))
    # Python's streams know whether they can seek, and these may be pipes.
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    try:
        forked.command(
            "shardwise",
            request["words"],  # type: ignore[arg-type]
            stdout,
            stderr,
            request["environ"],  # type: ignore[arg-type]
            str(request["folder"]),
        )
    finally:
        os._exit(1)  # its streams are gone, because the program is


def _pass_on(pid: int, link: socket.socket) -> None:
    try:
        numbers = link.recv(64)
    except OSError:
        numbers = b""
    if not numbers:
        _kill_all(pid)
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_all(launcher: int) -> None:
    """A launcher and its ranks at once. It is stopped first, so that it starts no other."""
    from chaos_ranks import ranks_of

    with suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGSTOP)
        for pid in (*ranks_of(launcher).values(), launcher):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
