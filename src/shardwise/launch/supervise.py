"""Restart ranks when one dies or hangs: with a new store each time, up to a budget."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode, UserError
from shardwise.launch.failure import Passing
from shardwise.launch.say import say_on_console
from shardwise.metrics.events import EventLog, read_whole_events
from shardwise.plan.planned import Plan


def why_final(error: UserError, plan: Plan, restarts: int, step_before: int) -> str | None:
    """Why another start of the ranks would not help; None where it may."""
    budget = plan.config.train.max_restarts
    if not isinstance(error, Passing):
        return "the ranks were not started again, because the same error would come again"
    if restarts >= budget:
        return f"the ranks were started again {restarts} times; train.max_restarts={budget}"
    if restarts > 0 and last_step(plan.run_dir) <= step_before:
        return "the ranks were not started again: the last start got no further than before"
    return None


def with_reason(error: UserError, reason: str) -> UserError:
    """The error of a rank that died, and why the ranks were not restarted."""
    if error.code != ExitCode.WORKER_DIED:
        return error
    why = f"{error.why}; {reason}" if error.why else reason
    return UserError(error.what, why=why, fix=error.fix, code=error.code)


def announce_restart(error: UserError, plan: Plan, restarts: int) -> None:
    """Print one line, and record one event."""
    budget = plan.config.train.max_restarts
    cause = f"{error.what} ({error.why})" if error.why else error.what
    say_on_console(f"ALERT: {cause}; starting the ranks again ({restarts} of {budget})")
    with EventLog(plan.run_dir / "events.jsonl", enabled=True) as events:
        events.write("restart", reason=error.what, why=error.why, number=restarts)


def last_step(run_dir: Path) -> int:
    """The last step in the run's record, or its newest checkpoint where that is later: on a full
    disk the record ends early."""
    path = run_dir / "events.jsonl"
    try:
        events = read_whole_events(path)
    except OSError:
        events = []
    steps = [event["step"] for event in events if event["event"] == "step"]
    saved = [found.step for found in list_checkpoints(run_dir / "checkpoints")]
    return max([*steps, *saved], default=0)
