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
        self._file = path.open("a", encoding="utf-8") if enabled else None
        # A killed run may have left half a line; what follows must not be joined to it.
        if self._file is not None and not _ends_whole(path):
            self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """One line, flushed, so that a killed run loses nothing it has said."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
            self._file.flush()

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
