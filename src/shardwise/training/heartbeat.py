"""A sign of life after every step, for the launcher to watch."""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from pathlib import Path

HEARTBEAT_VARIABLE = "SHARDWISE_HEARTBEATS"


class Heartbeat:
    """Touches a file that is named by the process id; does nothing where nobody watches."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(HEARTBEAT_VARIABLE)
        self._path = Path(folder, f"{rank}-{os.getpid()}") if folder else None
        # A hung rank is sent SIGABRT: its stacks go to its log, even from inside a collective.
        faulthandler.enable(file=sys.stderr, all_threads=True)
        if self._path is not None:
            self._path.touch()

    def beat(self) -> None:
        """Still here. From the first beat on the file is not empty, and its age counts.

        A full disk has no room for the first beat, but new times for those after it.
        """
        if self._path is None:
            return
        with suppress(OSError):
            if self._path.stat().st_size:
                os.utime(self._path)
            else:
                self._path.write_text("beats")
