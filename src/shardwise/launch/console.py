"""Where the first rank prints: to this process's own standard output, or through `sys.stdout`."""

from __future__ import annotations

import codecs
import io
import os
import sys

_STDOUT = 1


class Console:
    """Gives a rank its standard output.

    A notebook, or code that redirects `sys.stdout`, does not see what a child process writes to
    descriptor 1. There the rank writes into a pipe, and `forward` prints its text.
    """

    def __init__(self) -> None:
        self.stdout: int | None = None
        """What the rank is started with; None: what it inherits."""

        self._read: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if not _is_own_output():
            self._read, self.stdout = os.pipe()
            os.set_blocking(self._read, False)

    def started(self) -> None:
        """Called when the rank has the other end of the pipe."""
        if self.stdout is not None:
            os.close(self.stdout)
            self.stdout = None

    def forward(self) -> None:
        """Print what has arrived. Called by the thread that `sys.stdout` belongs to."""
        while self._read is not None:
            try:
                data = os.read(self._read, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()

    def close(self) -> None:
        """Print the rest."""
        self.started()
        self.forward()
        if self._read is not None:
            os.close(self._read)
            self._read = None


def _is_own_output() -> bool:
    try:
        return sys.stdout.fileno() == _STDOUT
    except (AttributeError, io.UnsupportedOperation, ValueError):
        return False
