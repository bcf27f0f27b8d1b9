"""A line for whoever watches the command."""

from __future__ import annotations

import sys
from contextlib import suppress


def say_on_console(text: str) -> None:
    """Written at once, also where the output is a file. A line that cannot be written is dropped:
    no output is worth the training that it is about."""
    with suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
