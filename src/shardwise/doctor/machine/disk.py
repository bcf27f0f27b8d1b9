"""How fast a directory takes what is written to it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from shardwise.units import MIB

_TRIAL_BYTES = 64 * MIB
_PIECE_BYTES = 4 * MIB
# A slow disk is known to be slow after this long.
_LONGEST_S = 3.0


def write_rate(directory: Path) -> float | None:
    """Bytes per second that reach the disk; None where nothing can be written.

    The directory need not exist yet: the trial is made in the nearest one that does.
    """
    try:
        place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            piece, began, written = os.urandom(_PIECE_BYTES), time.monotonic(), 0
            while written < _TRIAL_BYTES and time.monotonic() - began < _LONGEST_S:
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                written += len(piece)
            return written / max(1e-9, time.monotonic() - began)
    except OSError:
        return None
