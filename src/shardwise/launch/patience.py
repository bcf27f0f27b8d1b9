"""One line on a terminal while something takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

_EVERY_S = 1.0


@contextmanager
def shown_progress(text: str) -> Iterator[None]:
    """Inside, `text` stands on the terminal with the seconds so far. Pipes and files get nothing:
    whoever reads them later does not wait."""
    if not sys.stderr.isatty():
        yield
        return
    began, done = time.monotonic(), Event()

    def write(end: str) -> None:
        # The carriage return lets the next write take this one's place.
        sys.stderr.write(f"\r{text}: {time.monotonic() - began:.0f} s{end}")
        sys.stderr.flush()

    def repeat() -> None:
        while not done.wait(_EVERY_S):
            write("")

    write("")
    clock = Thread(target=repeat, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()
        write("\n")
