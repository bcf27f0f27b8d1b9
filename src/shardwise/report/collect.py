"""The files of one run in one object. Missing and broken files become notes, never errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shardwise.checkpoint.store import Entry, list_entries
from shardwise.errors import UserError
from shardwise.files import read_bytes
from shardwise.metrics.goodput import goodput
from shardwise.metrics.read_events import GrowingRecord
from shardwise.plan.planned import Plan
from shardwise.report.values import Event, number, of_kind, whole
from shardwise.units import format_duration

# After these events a run has gone back to `step`, and what was recorded of later steps no longer
# holds.
_GO_BACK = ("start", "resume", "rollback")
# The last of these says whether a run is at work.
_LIFE = ("start", "restart", "stopped", "end")
# What an event must have to be counted.
_COUNTED = {
    "start": ("step",),
    "rollback": ("step",),
    "step": ("step", "step_s", "data_share"),
    "checkpoint": ("stage_s",),
    "checkpoint_failed": ("stage_s",),
}
# The page shows the whole of it.
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)  # no slots: they leave no room for cached properties
class RunRecord:
    """One run: plan.json, events.jsonl and the checkpoints, as far as they can be read."""

    path: Path
    name: str
    plan: Plan | None
    planned_at: float
    """When plan.json was written. Every start writes it first."""

    config: str
    """The text of config.yaml."""

    events: tuple[Event, ...]
    checkpoints: tuple[Entry, ...]
    notes: tuple[str, ...]
    """What could not be read."""

    @cached_property
    def steps(self) -> list[Event]:
        """The logged steps, each once, as it was computed last."""
        return self.history("step")

    @cached_property
    def steady(self) -> list[Event]:
        """The same without the first of every start, which holds warm-up and compilation."""
        first = first_of_starts(self.events)
        return [event for event in self.steps if id(event) not in first]

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, as planned."""
        if self.plan is not None:
            return self.plan.settings.train.steps
        return whole(self.steps[-1], "num_steps") if self.steps else None

    @property
    def has_ended(self) -> bool:
        """Whether the last start has ended, and no later one has begun."""
        life = of_kind(self.events, *_LIFE)
        if not life or life[-1]["event"] != "end":
            return False
        is_complete = (whole(life[-1], "step") or 0) >= (self.num_steps or 0)
        return is_complete or self.planned_at <= (number(life[-1], "time") or 0.0)

    @property
    def is_open(self) -> bool:
        """Whether the last start has said nothing of its end: it is at work, or dead."""
        life = of_kind(self.events, *_LIFE)
        return bool(life) and life[-1]["event"] in ("start", "restart")

    def history(self, kind: str) -> list[Event]:
        """Events of one kind by step. Going back to a checkpoint removes the later ones."""
        return self._histories.get(kind, [])

    def times(self) -> list[float]:
        """The times at which something happened, in the order of the record."""
        return self._times

    @cached_property
    def spent(self) -> Mapping[str, float] | None:
        """Seconds by kind of work; None before there is anything to count."""
        counted = [event for event in self.events if _can_be_counted(event)]
        if not any(event["event"] == "step" for event in counted):
            return None
        spent = goodput(counted)
        return spent if sum(spent.values()) > 0 else None

    @cached_property
    def _times(self) -> list[float]:
        return [at for event in self.events if (at := number(event, "time")) is not None]

    @cached_property
    def _histories(self) -> dict[str, list[Event]]:
        found: defaultdict[str, dict[int, Event]] = defaultdict(dict)
        for event in self.events:
            step = whole(event, "step")
            if step is None:
                continue
            if event["event"] not in _GO_BACK:
                found[event["event"]][step] = event
                continue
            for kind, by_step in found.items():
                found[kind] = {at: kept for at, kept in by_step.items() if at <= step}
        return {kind: [at[step] for step in sorted(at)] for kind, at in found.items()}


def collect_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """All runs, under names that tell them apart."""
    runs = [collect_run(path) for path in paths]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(path))
        for run, path in zip(runs, paths, strict=True)
    ]


def collect_run(path: Path, record: GrowingRecord | None = None) -> RunRecord:
    """Everything that a run directory tells. Of a `record` that is kept only the news are read."""
    notes: list[str] = []
    events = _read_events(record or GrowingRecord(path / "events.jsonl"), notes)
    checkpoints = _list_checkpoints(path / "checkpoints", notes)
    return RunRecord(
        path=path,
        name=path.resolve().name,
        plan=_read_plan(path / "plan.json", notes),
        planned_at=modified_at(path / "plan.json"),
        config=_read_text(path / "config.yaml", notes),
        events=tuple(events),
        checkpoints=checkpoints,
        notes=tuple(notes),
    )


def first_of_starts(events: Sequence[Event]) -> set[int]:
    """Identities of the first step event after every start."""
    found, fresh = set(), True
    for event in events:
        if event["event"] in _GO_BACK:
            fresh = True
        elif event["event"] == "step" and fresh:
            found.add(id(event))
            fresh = False
    return found


def state_of(run: RunRecord, now: float) -> str:
    """The state of the run in one phrase."""
    life = of_kind(run.events, *_LIFE)
    if not life:
        return "not started"
    last = life[-1]
    if last["event"] == "end":
        if last.get("early", False):
            return "stopped early: the held-out loss fell no more"
        return "finished" if last.get("finished", True) else "ended as train.stop_after says"
    if last["event"] == "stopped":
        return f"stopped by {last.get('reason', 'a signal')}, and saved"
    if not run.times():
        return "started"
    return f"running or dead: its last event was {format_duration(now - run.times()[-1])} ago"


def _read_plan(path: Path, notes: list[str]) -> Plan | None:
    if not path.exists():
        notes.append("there is no plan.json")
        return None
    try:
        return Plan.load(path)
    except UserError as error:
        # Cut off, or written by another version of shardwise.
        notes.append(f"plan.json cannot be read: {error.why or error.what}")
        return None


def _list_checkpoints(root: Path, notes: list[str]) -> tuple[Entry, ...]:
    try:
        return tuple(list_entries(root))
    except UserError as error:
        notes.append(error.what)
        return ()


def _read_events(file: GrowingRecord, notes: list[str]) -> list[Event]:
    try:
        record = file.read_on()
    except FileNotFoundError:
        notes.append("there is no events.jsonl yet")
        return []
    except OSError as error:
        notes.append(f"events.jsonl cannot be read: {error.strerror}")
        return []
    if record.fault:
        notes.append(f"{record.fault}; what cannot be read in them is left out")
    return record.events


def _can_be_counted(event: Event) -> bool:
    needs = ("time", *_COUNTED.get(event["event"], ()))
    return all(number(event, key) is not None for key in needs)


def modified_at(path: Path) -> float:
    """When a file was written; the beginning of time where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return read_bytes(path, _MAX_CONFIG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
