"""A feed: the thread that carries events from the training loop to one sink."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from shardwise.metrics.events import Event

# A sink that is this many events behind does not come back: its network or its disk is gone.
MAX_BEHIND = 1000
# How long the end of a run waits for a sink to write out what it has.
CLOSE_S = 20.0


class Sink(Protocol):
    """Takes events in a thread of its own; whatever it raises ends it, and nothing else."""

    def see(self, event: Event) -> None:
        """One event, in the order of the record."""

    def close(self) -> None:
        """Write out what is left."""


class Feed:
    """Opens a sink and feeds it, away from the training thread.

    The loop only puts a reference into a queue. The thread is a daemon: a sink that hangs does not
    keep the process from ending. What a sink raises ends the thread, goes to the rank's log with
    its stack, and is the feed's `failure`.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        max_behind: int = MAX_BEHIND,
        close_s: float = CLOSE_S,
    ) -> None:
        self.name = name
        self._open_sink = open_sink
        self._close_s = close_s
        self._failure: str | None = None
        self._events: queue.Queue[Event | None] = queue.Queue(max_behind)
        self._thread = threading.Thread(target=self._carry, daemon=True, name=name)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the sink sees no more events; None while it does."""
        return self._failure

    def see(self, event: Event) -> None:
        """Hand an event over; never waits."""
        self._put(event)

    def close(self) -> None:
        """Let the sink take what is queued and close, for a while."""
        self._put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._fail(f"it did not close within {self._close_s:g} s")

    def _put(self, event: Event | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._fail(f"it is {self._events.maxsize} events behind")

    def _carry(self) -> None:
        try:
            sink = self._open_sink()
            try:
                while (event := self._events.get()) is not None:
                    sink.see(event)
            finally:
                sink.close()
        finally:
            # Not caught: the stack goes on to the log of this rank.
            if (error := sys.exc_info()[1]) is not None:
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
