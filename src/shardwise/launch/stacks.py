"""Read the stacks of a hung rank from its log: whether it was waiting in a collective, and in
which."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.internals.private_names import STORE_HELPERS

_FRAME = re.compile(r'File ".*?distributed_c10d\.py", line \d+ in (\w+)')
# Helpers inside torch's collectives file, whose names say nothing.
_NOT_COLLECTIVES = {"wrapper", *STORE_HELPERS}

# The thread that took the signal: usually the main one.
_PLACE = re.compile(r'^Current thread .*\n  File "(.*?)", line (\d+) in (.+)$', re.MULTILINE)


def collective_of(log: Path) -> str | None:
    """The first collective in the dumped stacks of a rank."""
    names = [name for name in _FRAME.findall(_dump_in(log)) if name not in _NOT_COLLECTIVES]
    return names[0] if names else None


def place_of(log: Path) -> str | None:
    """The innermost function in the dumped stacks of a rank."""
    found = _PLACE.search(_dump_in(log))
    return f"{found[3]} ({found[1]}:{found[2]})" if found else None


def _dump_in(log: Path) -> str:
    """The last dump; empty where the log cannot be read."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition("Fatal Python error")[2]
