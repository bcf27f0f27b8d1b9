"""events.jsonl: one JSON object a line, the record that every report is made from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from shardwise.lease.lease import UNFENCED, Fence, LostLease
from shardwise.metrics.record import Event, read_events, read_whole_events

__all__ = ["Event", "EventLog", "Observer", "read_events", "read_whole_events"]


class Observer(Protocol):
    """Sees every event after it is written. It must neither raise nor keep its caller waiting."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def failure(self) -> str | None:
        """Why it sees no more events; None while it does."""

    def see(self, event: Event) -> None:
        """One event, as the line holds it."""

    def close(self) -> None:
        """No event comes any more."""


def _say_nothing(text: str) -> None:
    """For logs that nobody watches."""


class EventLog:
    """Appends events and shows them to observers; where it is not enabled, to these only."""

    def __init__(
        self,
        path: Path,
        *,
        enabled: bool,
        observers: Sequence[Observer] = (),
        say: Callable[[str], None] = _say_nothing,
        fence: Fence = UNFENCED,
    ) -> None:
        # Unbuffered: a line that could not be written must not come back with a later one.
        self._file = path.open("ab", buffering=0) if enabled else None
        self._lost = 0
        self._observers = list(observers)
        self._say = say
        self._fence = fence
        # A killed run may have left half a line; what follows must not be joined to it.
        if self._file is not None and not _ends_whole(path):
            with suppress(OSError):
                self._file.write(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """One line, written through, so that a killed run loses nothing it has said.

        A full disk must not end the training that the record is about: the line is dropped, and
        the next one that can be written says how many were. A job that has lost the run directory
        writes no more: the record is another's.
        """
        if self._fence.lost or (self._file is None and not self._observers):
            return
        lost = {"lines_lost": self._lost} if self._lost else {}
        record = {"event": event, "time": time.time(), **fields, **lost}
        self._append(json.dumps(record) + "\n")
        if self._fence.lost:
            # What observers keep lies in the same directory.
            return
        for observer in self._observers:
            observer.see(record)
        self._drop_failed()

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
        self._drop_failed()
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._fence.validate()
            self._file.write(line.encode())
            self._lost = 0
        except LostLease:
            return
        except OSError:
            self._lost += 1

    def _drop_failed(self) -> None:
        """An observer that failed is named once, in the record and on the console."""
        for observer in [one for one in self._observers if one.failure is not None]:
            self._observers.remove(observer)
            self._say(f"ALERT: {observer.name} gets no more events: {observer.failure}")
            self.write("sink_failed", sink=observer.name, reason=observer.failure)


def _ends_whole(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
