"""events.jsonl: one JSON object on each line. Every report is made from this record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from shardwise.lease.lease import UNFENCED, Fence, LostLease
from shardwise.metrics.appended import AppendedFile
from shardwise.metrics.read_events import Event, read_events, read_whole_events

__all__ = ["Event", "EventLog", "Observer", "read_events", "read_whole_events"]


class Observer(Protocol):
    """Sees every event after it is written. It must neither raise nor keep its caller waiting."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def failure(self) -> str | None:
        """Why it sees no more events; None while it does."""

    def news(self) -> list[str]:
        """Messages about it for the user, since the last call."""

    def see(self, event: Event) -> None:
        """Take one event, as its line holds it."""

    def close(self) -> None:
        """Close: no more events come."""


def _say_nothing(text: str) -> None:
    """For logs that nobody watches."""


class EventLog:
    """Appends events and shows them to observers. A log that is not enabled only shows them."""

    def __init__(
        self,
        path: Path,
        *,
        enabled: bool,
        observers: Sequence[Observer] = (),
        say: Callable[[str], None] = _say_nothing,
        fence: Fence = UNFENCED,
    ) -> None:
        self._file = AppendedFile(path) if enabled else None
        self._name = path.name
        self._lost = 0
        self._observers = list(observers)
        self._say = say
        self._fence = fence

    def write(self, event: str, **fields: Any) -> None:
        """Write one line through to the disk, so a killed run loses nothing that it has said.

        A full disk must not end the training that the record is about. The line is dropped, and the
        next line that can be written says how many. A job that has lost the run directory
        writes no more, because the record is another job's.
        """
        if self._fence.lost or (self._file is None and not self._observers):
            return
        lost = {"lines_lost": self._lost} if self._lost else {}
        record = {"event": event, "time": time.time(), **fields, **lost}
        self._append(json.dumps(record) + "\n")
        if self._fence.lost:
            # Observers write to the same directory.
            return
        for observer in self._observers:
            observer.see(record)
        self._tell_of_observers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for observer in self._observers:
            observer.close()
        self._tell_of_observers()
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._fence.validate()
            self._file.append(line.encode())
        except LostLease:
            return
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                self._say(f"ALERT: {self._name} cannot be written: {error.strerror or error}")
            return
        if self._lost:
            self._say(f"{self._name} can be written again; {self._lost} lines of it are missing")
        self._lost = 0

    def _tell_of_observers(self) -> None:
        """Report an observer that failed once, in the record and on the console."""
        for text in [text for observer in self._observers for text in observer.news()]:
            self._say(text)
        for observer in [one for one in self._observers if one.failure is not None]:
            self._observers.remove(observer)
            self._say(f"ALERT: {observer.name} gets no more events: {observer.failure}")
            self.write("sink_failed", sink=observer.name, reason=observer.failure)
