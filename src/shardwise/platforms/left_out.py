"""Nodes that leave themselves out of the next start of a job."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Names the file of nodes that are left out. The script of a job sets it where its run may go on
# with fewer nodes.
EXCLUDE_VARIABLE = "SHARDWISE_EXCLUDE"


def leave_out_next_time(environ: Mapping[str, str]) -> str | None:
    """Add this node to the list; returns its name where the job reads such a list."""
    file, node = environ.get(EXCLUDE_VARIABLE), environ.get("SLURMD_NODENAME")
    if not file or not node:
        return None
    # A file system that is away must not end a run that could go on.
    with suppress(OSError), Path(file).open("a", encoding="utf-8") as stream:
        stream.write(f"{node}\n")
        return node
    return None
