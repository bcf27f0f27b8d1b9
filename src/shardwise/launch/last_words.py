"""How a rank under torchrun or srun reports why it ends: once on a node's terminal, with its
log."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.errors import ExitCode, UserError
from shardwise.launch.failure import comes_from_outside
from shardwise.launch.node_path import ERROR_FILE_VARIABLE, node_place
from shardwise.launch.parent import AGENT_VARIABLE
from shardwise.launch.rank_environment import is_rank

_LOG_NOTE = "log: "


class RankTerminal:
    """Keeps the terminal while a rank's stderr is its log. Errors are shown with rank, host and
    log."""

    def __enter__(self) -> Self:
        self._terminal = os.dup(sys.stderr.fileno())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        log = _log_of(error)
        if error is not None and log:
            traceback.print_exception(error)  # stderr is the log
        # Python's own stream alone: what libraries say while the process ends is for the log.
        sys.stderr = os.fdopen(self._terminal, "w", encoding="utf-8", errors="replace")
        if isinstance(error, Exception):
            raise _as_of_this_rank(error, log) from error


@contextmanager
def shared_errors() -> Iterator[None]:
    """Before the ranks have met, raise the error of one rank on all, because the others would
    wait for it."""
    try:
        yield
    except Exception as error:
        if not is_rank(os.environ):
            raise
        from shardwise.launch.peers import refuse  # imports torch

        raise refuse(as_user_error(error, log="")) from error


@contextmanager
def errors_naming(log: Path) -> Iterator[None]:
    """Errors of the block carry the path of the log that has more."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{_LOG_NOTE}{log}")
        raise


def leave_word(error: UserError, environ: Mapping[str, str]) -> bool:
    """Write the error for the agent, if there is one. Returns True where this process shows it.

    Ranks tend to fail together, and the first of a node reports for the others.
    """
    if not is_rank(environ):
        return True
    file = environ.get(ERROR_FILE_VARIABLE)
    if AGENT_VARIABLE in environ and file:
        _write_error_file(Path(file), f"UserError: {error}", error)
        return False
    if file:
        shown = f"the error of the first rank to fail on {_host()} is shown above"
        _write_error_file(Path(file), f"{shown}; each rank's own is in its log", error)
    return _is_first_of_node(environ)


def _as_of_this_rank(error: Exception, log: str) -> UserError:
    """The error as users see it, with the rank's name where there is a log."""
    told = as_user_error(error, log)
    if told is error and not log:
        return told
    is_failure = told.code != ExitCode.PREEMPTED
    place = f"rank {os.environ['RANK']} on {_host()} failed: " if is_failure else ""
    fix = told.fix
    if told is error:
        fix = f"{fix}\n  {_LOG_NOTE}{log}" if fix else f"read {log}"
    return UserError(place + told.what, why=told.why, fix=fix, code=told.code)


def as_user_error(error: Exception, log: str) -> UserError:
    """An unexpected error in the form of the others: what, where, and what to read."""
    if isinstance(error, UserError):
        return error
    cause = traceback.format_exception_only(error)[0].strip().splitlines()[0]
    if log:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = f"File {frame.filename!r}, line {frame.lineno}, in {frame.name}"
    else:
        why = "".join(traceback.format_exception(error)).strip()
    again = "run the same command again to resume"
    fix = f"read {log}; then {again}" if log else again
    return UserError(cause, why=why, fix=fix, code=ExitCode.WORKER_DIED)


def _log_of(error: BaseException | None) -> str:
    notes = getattr(error, "__notes__", [])
    return next((n.removeprefix(_LOG_NOTE) for n in notes if n.startswith(_LOG_NOTE)), "")


def _write_error_file(path: Path, text: str, error: UserError) -> None:
    """Write the error as torch's `record` does, without the traceback that torchrun would show in
    full.

    Where it cannot be written, the exit code has to do.
    """
    cause = error.__cause__ or error
    passing = comes_from_outside("".join(traceback.format_exception_only(cause)).strip())
    extra = {"timestamp": str(int(time.time())), "passing": passing}
    message = {"message": text, "extraInfo": extra, "errorCode": int(error.code)}
    with suppress(OSError):
        path.write_text(json.dumps({"message": message}), encoding="utf-8")


def _is_first_of_node(environ: Mapping[str, str]) -> bool:
    """Whether this rank creates the file first. Ranks that share no such place report for
    themselves."""
    place = node_place(environ, "said")
    if place is None:
        return True
    try:
        place.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # nobody can tell who was first: better twice than never
    return True


def _host() -> str:
    return socket.gethostname()
