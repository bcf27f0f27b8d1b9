"""A line for whoever watches the command."""

from __future__ import annotations

import sys


def say_on_console(text: str) -> None:
    """Written at once, also where the output is a file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
