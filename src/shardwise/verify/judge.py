"""The gates of a run directory, and how they are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from shardwise.checkpoint.store import list_entries
from shardwise.errors import ExitCode, UserError
from shardwise.lease.take import hold_run
from shardwise.metrics.events import EventLog, read_whole_events
from shardwise.metrics.read_events import read_record
from shardwise.plan.planned import Plan
from shardwise.verify.gates import Gate, check_gates, check_record


def judge_run(run: Path) -> list[Gate]:
    """Every gate, judged by the files of the run."""
    plan = Plan.load(find_file(run, "plan.json"))
    record = read_record(find_file(run, "events.jsonl"))
    entries = list_entries(run / "checkpoints")
    damaged = [e.path.name for e in entries if e.is_bad]
    return [*check_gates(plan, record.whole, damaged), *check_record(record)]


def record_gates(run: Path, gates: Sequence[Gate]) -> None:
    """Add the gates to the record, unless it has a verdict on the run's last step already.

    Where another job continues the run by now, that job writes the verdict. On a full disk the
    verdict is dropped, as other lines of the record are.
    """
    path = run / "events.jsonl"
    with suppress(UserError), hold_run(run, patience_s=0) as lease:
        events = [event for event in read_whole_events(path) if event["event"] in ("step", "gates")]
        if events and events[-1]["event"] == "step":
            with EventLog(path, enabled=True, fence=lease) as log:
                log.write("gates", step=events[-1]["step"], gates=[asdict(gate) for gate in gates])


def validate_passed(run: Path, gates: Sequence[Gate]) -> None:
    """Raise where a gate failed."""
    failed = [gate.name for gate in gates if gate.verdict == "fail"]
    if failed:
        raise UserError(
            f"{run} did not pass: {', '.join(failed)}",
            fix=f"the advice stands beside each gate: shardwise verify {quote(str(run))}",
            code=ExitCode.VERIFY_FAILED,
        )


def find_file(run: Path, name: str) -> Path:
    """A file that every run directory has."""
    path = run / name
    if not path.is_file():
        raise UserError(
            f"{run} is no run directory",
            why=f"it has no {name}",
            fix="name the directory that `shardwise train` printed, such as runs/NAME",
        )
    return path
