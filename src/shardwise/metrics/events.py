"""events.jsonl: one JSON object a line, the record that every report is made from."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class EventLog:
    """Appends events; on ranks other than 0 it does nothing."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        # Unbuffered: a line that could not be written must not come back with a later one.
        self._file = path.open("ab", buffering=0) if enabled else None
        self._lost = 0
        # A killed run may have left half a line; what follows must not be joined to it.
        if self._file is not None and not _ends_whole(path):
            with suppress(OSError):
                self._file.write(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """One line, written through, so that a killed run loses nothing it has said.

        A full disk must not end the training that the record is about: the line is dropped, and
        the next one that can be written says how many were.
        """
        if self._file is None:
            return
        lost = {"lines_lost": self._lost} if self._lost else {}
        line = json.dumps({"event": event, "time": time.time(), **fields, **lost}) + "\n"
        try:
            self._file.write(line.encode())
            self._lost = 0
        except OSError:
            self._lost += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a run; lines that a kill cut off are left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def _ends_whole(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
