"""A path that the ranks of one node share, under launchers that are not ours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

# The agent of torchrun names a file for each rank's error, and shows what it says.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def node_place(environ: Mapping[str, str], name: str) -> Path | None:
    """A path that only the ranks of this node and this start share; None where the launcher
    tells too little."""
    if "TORCHELASTIC_RUN_ID" in environ and ERROR_FILE_VARIABLE in environ:
        # The agent has a folder for each start, and in it one for each of its ranks.
        return Path(environ[ERROR_FILE_VARIABLE]).parent.parent / name
    if "SLURM_JOB_ID" in environ:
        step = [
            environ.get(f"SLURM_{part}", "0") for part in ("JOB_ID", "RESTART_COUNT", "STEP_ID")
        ]
        return Path(tempfile.gettempdir(), f"shardwise-{name}-{os.getuid()}-{'.'.join(step)}")
    return None
