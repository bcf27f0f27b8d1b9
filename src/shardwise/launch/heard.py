"""Signals that a process has had, whatever became of what their handlers raised."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Self

_MOST_AT_ONCE = 64


class HeardSignals:
    """Notes signals that Python handles while its block runs, by the interpreter itself.

    A handler that raises may raise inside a block that swallows exceptions, such as that of a
    logging handler or a finalizer. Then the signal is lost to the program, but not to this note.
    """

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._former)
        os.close(self._read)
        os.close(self._write)

    def first(self) -> signal.Signals | None:
        """The first one since the last call, if any."""
        with suppress(BlockingIOError):
            return signal.Signals(os.read(self._read, _MOST_AT_ONCE)[0])
        return None
