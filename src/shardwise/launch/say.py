"""Lines for the user on the console, and for the log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class Lines:
    """Writes lines to one place.

    A line that cannot be written is dropped and counted, because no output is worth ending the
    training. The next line that can be written says how many are missing.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lost = 0

    def say(self, text: str) -> None:
        """Write a line at once."""
        missing = f"({self._lost} lines before this one could not be written)\n"
        try:
            self._write(f"{missing if self._lost else ''}{text}\n")
            self._lost = 0
        # ValueError: someone has closed the stream.
        except (OSError, ValueError):
            self._lost += 1


def write_to_console(text: str) -> None:
    """Write to standard output at once, also where that is a file."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_to(handle: int) -> Callable[[str], None]:
    """Write all of it into an open file: a disk that fills up takes a part."""

    def write(text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(handle, data) :]

    return write


def say_on_console(text: str) -> None:
    """Print one line."""
    Lines(write_to_console).say(text)
