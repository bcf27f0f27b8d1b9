"""Where the first rank prints: on this process's own standard output, or through `sys.stdout`."""

from __future__ import annotations

import codecs
import io
import os
import sys

_STDOUT = 1


class Console:
    """Gives a rank its standard output.

    A notebook, or whoever redirects `sys.stdout`, does not see what a child process writes to
    descriptor 1. There the rank writes into a pipe, and `forward` passes its text on.
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
        """The rank holds the pipe's other end now."""
        if self.stdout is not None:
            os.close(self.stdout)
            self.stdout = None

    def forward(self) -> None:
        """Pass on what was printed since; called by the thread that `sys.stdout` belongs to."""
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
        """Pass the rest on."""
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
