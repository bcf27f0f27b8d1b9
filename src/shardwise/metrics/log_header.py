"""The first line of a rank's log: who writes it, where, and since when."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping

_HEADER = re.compile(r"\S+ rank \d+ of \d+ on (\S+), process \d+")


def header(rank: int, world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """The line of this process. Slurm's name of the node is the one that its commands take."""
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{now} rank {rank} of {world_size} on {node}, process {os.getpid()}"


def node_of(line: str) -> str | None:
    """The node that a header names; None for any other line."""
    found = _HEADER.match(line)
    return None if found is None else found[1]
