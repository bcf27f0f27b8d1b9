"""A line for whoever watches the command, and for the log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class Lines:
    """Writes lines to one place. A line that cannot be written is dropped and counted: no output is
    worth the training that it is about. The next one that can be says how many are missing."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lost = 0

    def say(self, text: str) -> None:
        """Written at once."""
        missing = f"({self._lost} lines before this one could not be written)\n"
        try:
            self._write(f"{missing if self._lost else ''}{text}\n")
            self._lost = 0
        # ValueError: someone has closed the stream.
        except (OSError, ValueError):
            self._lost += 1


def write_to_console(text: str) -> None:
    """On standard output, at once, also where that is a file."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_to(handle: int) -> Callable[[str], None]:
    """Into an open file, all of it: a disk that fills takes a part."""

    def write(text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(handle, data) :]

    return write


def say_on_console(text: str) -> None:
    """One line, for who says little."""
    Lines(write_to_console).say(text)
