"""The list of runs: of each, what the end of its record says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from shardwise.errors import UserError
from shardwise.files import read_tail
from shardwise.metrics.read_events import Event, parse_event
from shardwise.platforms.job_of_run import state_of_process
from shardwise.report.collect import RunRecord, modified_at, state_of
from shardwise.report.markup import Html, table, tag
from shardwise.report.values import number, whole
from shardwise.ui.follow import RunsFolder, Stamp, stamp_of
from shardwise.units import format_count, format_duration

# A hundred steps and more; a run writes what it is at far more often.
_TAIL_BYTES = 2**16
MOST_ROWS = 500
_FILES = ("events.jsonl", "plan.json")


@dataclass(frozen=True, slots=True)
class _Tail:
    stamp: Stamp
    run: RunRecord


class Overview:
    """The rows of a folder. A run whose files are as they were is not read again."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._tails: dict[Path, _Tail] = {}

    def draw(self, now: float) -> Html:
        """The table, the run that was started last on top, so that rows stay where they are."""
        paths = self._folder.paths().values()
        self._tails = {path: self._tail(path) for path in paths}
        runs = sorted((tail.run for tail in self._tails.values()), key=_start, reverse=True)
        if not runs:
            return tag("p", f"there is no run in {self._folder.path} yet", class_="empty")
        rows = [_row(run, now) for run in runs[:MOST_ROWS]]
        head = ("compare", "run", "state", "step", "loss", "tok/s per device", "last event")
        drawn = table(head, rows, name="runs-table", numbers=range(3, 7), stacked=True)
        left_out = len(runs) - len(rows)
        note = tag("p", f"{left_out} older runs are left out", class_="note") if left_out else ""
        return tag("div", drawn, note)

    def _tail(self, path: Path) -> _Tail:
        stamp = stamp_of(path / name for name in _FILES)
        known = self._tails.get(path)
        return known if known and known.stamp == stamp else _Tail(stamp, _run_of_tail(path))


def state_in_words(run: RunRecord, now: float) -> str:
    """The state of a run, and of one that has said no end, whether its process lives."""
    if not run.is_open:
        return state_of(run, now)
    try:
        job = state_of_process(run.path)
    except (OSError, UserError):  # the lease is damaged, or gone
        return "running or dead: its lease cannot be read"
    if job.state == "running":
        return "running"
    if job.state == "unknown":
        return f"running or dead: {job.words}"
    return "dead: it has left no word of its end"


def ago(run: RunRecord, now: float) -> str:
    """How long ago something happened."""
    times = run.times()
    return f"{format_duration(max(0.0, now - times[-1]))} ago" if times else "-"


def _run_of_tail(path: Path) -> RunRecord:
    """The run with the last of its events, and with nothing else."""
    try:
        data = read_tail(path / "events.jsonl", _TAIL_BYTES)
    except OSError:
        data = b""
    # What the rest says is not known, but some start is there.
    events: list[Event] = [{"event": "start"}] if len(data) == _TAIL_BYTES else []
    # The first line may have lost its beginning. It is an event by no chance.
    for line in data.splitlines():
        event = parse_event(line)
        if event is not None:
            events.append(event)
    return RunRecord(
        path=path, name=path.resolve().name, plan=None, config="",
        planned_at=modified_at(path / "plan.json"),
        events=tuple(events), checkpoints=(), notes=(),
    )  # fmt: skip


def _row(run: RunRecord, now: float) -> tuple[object, ...]:
    last = run.steps[-1] if run.steps else {}
    step, total = whole(last, "step"), whole(last, "num_steps")
    loss, speed = number(last, "loss"), number(last, "tokens_per_s")
    choice = tag(
        "input", type="checkbox", name="run", value=run.name, id=f"compare-{run.name}",
        aria_label=f"compare {run.name}",
    )  # fmt: skip
    return (
        choice,
        tag("a", run.name, href=f"#{urlencode({'run': run.name})}"),
        state_in_words(run, now) if run.events else "no event can be read",
        "-" if step is None else f"{step} of {total or '?'}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if speed is None else format_count(speed),
        ago(run, now),
    )


def _start(run: RunRecord) -> tuple[float, str]:
    return run.planned_at, run.name
