"""One run as checks look at it: its record and its logs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.doctor.signatures.log import Logs, LogText, read_run_logs
from shardwise.metrics.event_fields import is_whole
from shardwise.report.collect import RunRecord, collect_run

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)  # no slots: they leave no room for cached properties
class Case:
    """What a run has left."""

    run: RunRecord
    logs: Logs = field(default=())
    now: float = field(default_factory=time.time)

    @cached_property
    def whole(self) -> list[Event]:
        """Events that have the fields of their kind."""
        return [event for event in self.run.events if "time" in event and is_whole(event)]

    @cached_property
    def steps(self) -> list[Event]:
        """Logged steps, each once, as it was computed last."""
        return [event for event in self.run.steps if is_whole(event)]

    @cached_property
    def steady(self) -> list[Event]:
        """The same without the first of every start, which holds warm-up and compilation."""
        return [event for event in self.run.steady if is_whole(event)]

    def of_kind(self, *kinds: str) -> list[Event]:
        """Whole events of these kinds, in order."""
        return [event for event in self.whole if event["event"] in kinds]


def read_case(run: Path, logs: Logs = ()) -> Case:
    """Everything that a run directory tells, and logs from elsewhere."""
    record = collect_run(run)
    return Case(run=record, logs=[*read_run_logs(run), *_reasons(record), *logs])


def _reasons(record: RunRecord) -> Logs:
    """What the launcher recorded when ranks died: a killed rank writes no line of its own."""
    restarts = [event for event in record.events if event["event"] == "restart"]
    lines = [f"{event.get('reason')} ({event.get('why')})" for event in restarts]
    return [LogText("events.jsonl", "\n".join(lines))] if lines else []
