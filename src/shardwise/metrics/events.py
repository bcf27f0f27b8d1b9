"""events.jsonl: one JSON object a line, the record that every report is made from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class EventLog:
    """Appends events; on ranks other than 0 it does nothing."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._file = path.open("a", encoding="utf-8") if enabled else None

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
    """All events of a run; a last line cut off by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
