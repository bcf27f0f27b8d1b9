"""Files that are not what their names say, and a limit on how long a test waits for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A wait for a pipe would never end; here it ends as a failure."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def put_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def put_holes(path: Path, num_bytes: int) -> Path:
    """A file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def alias_bomb() -> str:
    """A few hundred bytes of YAML that stand for 9**12 values."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(rows)
