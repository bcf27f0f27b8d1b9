"""Read the stacks that a hung rank left in its log: was it waiting in a collective, and which?"""

from __future__ import annotations

import re
from pathlib import Path

_FRAME = re.compile(r'File ".*?distributed_c10d\.py", line \d+ in (\w+)')
# Helpers inside torch's file of collectives, which say nothing.
_NOT_COLLECTIVES = {"wrapper", "_get_default_store", "_store_based_barrier"}

# Where the thread was that took the signal: the main one, as a rule.
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
    """The last one; nothing where the log cannot be read."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition("Fatal Python error")[2]
