"""Time during which a process really ran."""

from __future__ import annotations

import time
from collections.abc import Callable

# A process that reads the clock several times a second and finds more time gone was suspended.
_LONGEST_S = 1.0


class AwakeClock:
    """Counts seconds, but not those in which this process was suspended.

    A job that is suspended as a whole (by Slurm, or on a laptop that sleeps) has not hung: its
    watchdog was suspended with it. The clock must be read several times a second.
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
