"""Read the stacks that a hung rank left in its log: was it waiting in a collective, and which?"""

from __future__ import annotations

import re
from pathlib import Path

_FRAME = re.compile(r'File ".*?distributed_c10d\.py", line \d+ in (\w+)')
# Helpers inside torch's file of collectives, which say nothing.
_NOT_COLLECTIVES = {"wrapper", "_get_default_store", "_store_based_barrier"}


def collective_of(log: Path) -> str | None:
    """The first collective in the dumped stacks of a rank."""
    text = log.read_text(encoding="utf-8", errors="replace")
    dump = text.rpartition("Fatal Python error")[2]
    names = [name for name in _FRAME.findall(dump) if name not in _NOT_COLLECTIVES]
    return names[0] if names else None
