"""A feed: the thread that carries events from the training loop to one sink."""

from __future__ import annotations

import errno
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from shardwise.metrics.events import Event

# A sink that is this many events behind will not catch up: its network or its disk is gone.
MAX_BEHIND = 1000
# How long the end of a run waits for a sink to write what it has.
CLOSE_S = 20.0
# Between two tries to open a sink whose disk is full.
RETRY_S = 10.0
# Errors of a disk or file server that may pass.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}


class Sink(Protocol):
    """Takes events in a thread of its own. An error ends the sink, and nothing else."""

    def see(self, event: Event) -> None:
        """Take one event, in the order of the record."""

    def close(self) -> None:
        """Write what is left."""


class Feed:
    """Opens a sink and feeds it, outside the training thread.

    The loop only puts a reference into a queue. The thread is a daemon, so a sink that hangs does
    not keep the process from ending. With a full disk the sink loses events, which is reported. Any
    other error ends the thread, goes to the rank's log with its stack, and is the feed's `failure`.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        max_behind: int = MAX_BEHIND,
        close_s: float = CLOSE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.name = name
        self._retry_s = retry_s
        self._news: deque[str] = deque()
        self._lost = 0
        self._is_over = False
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
        """Let the sink take what is queued and close, within a time limit."""
        self._put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._fail(f"it did not close within {self._close_s:g} s")

    def _put(self, event: Event | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._fail(f"it is {self._events.maxsize} events behind")

    def news(self) -> list[str]:
        """Messages about the sink for the user, since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _carry(self) -> None:
        try:
            while self._carry_until_the_disk_fails():
                # Others write to that disk too, so the room may be gone a moment later.
                time.sleep(self._retry_s)
        finally:
            # This is not caught, so the stack goes to the log of this rank.
            if (error := sys.exc_info()[1]) is not None:
                self._fail(f"{type(error).__name__}: {error}")

    def _carry_until_the_disk_fails(self) -> bool:
        """Open the sink and feed it. Returns False when no more events come.

        A sink whose disk is full is opened again later, and the events in between are counted.
        """
        try:
            sink = self._open_sink()
            try:
                while (event := self._events.get()) is not None:
                    sink.see(event)
                    self._tell_of_lost()
            finally:
                sink.close()
            return False
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            if not self._lost:
                self._news.append(f"ALERT: {self.name} cannot be written: {error.strerror}")
            # The event that it failed at, and those that come before the next try.
            self._lost += 1 + self._drop_queued()
            return not self._is_over

    def _drop_queued(self) -> int:
        dropped = 0
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                self._is_over = self._is_over or event is None
                dropped += event is not None
        return dropped

    def _tell_of_lost(self) -> None:
        if self._lost:
            self._news.append(f"{self.name} can be written again; {self._lost} events are missing")
            self._lost = 0

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
