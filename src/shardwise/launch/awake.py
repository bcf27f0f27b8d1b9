"""Time as a process lives through it."""

from __future__ import annotations

import time
from collections.abc import Callable

# Whoever looks several times a second and finds more time gone was not running.
_LONGEST_S = 1.0


class AwakeClock:
    """Counts seconds, but not those in which this process was suspended.

    A job that is stopped as a whole (Slurm suspends it, a laptop sleeps) has not hung: its watch
    was stopped with it. The clock must be read several times a second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._awake_s = 0.0

    def read(self) -> float:
        """Seconds since the clock was made."""
        now = self._now()
        self._awake_s += min(now - self._last, _LONGEST_S)
        self._last = now
        return self._awake_s
