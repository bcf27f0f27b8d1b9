"""`shardwise logs` and `shardwise attach`: what all ranks say, merged by time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.find_run import find_run
from shardwise.cli.status import LAUNCHED, Run

_LOOK_EVERY_S = 1.0


def logs(
    run: Run,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 50,
) -> None:
    """Print the last lines of all ranks' logs, merged by time, with rank and node.

    Before a rank has started, it prints what the platform has kept of the job.

    \b
    Examples:
      shardwise logs runs/demo
      shardwise logs demo --lines 500
    Next: shardwise attach RUN
    """
    found = list(_all_lines(find_run(run, LAUNCHED)))
    for line in found[-lines:]:
        typer.echo(line)


def attach(run: Run) -> None:
    """Print a run's lines as they come, until its job ends. Ctrl-C leaves the job alone.

    \b
    Example:
      shardwise attach demo
    Next: shardwise status RUN
    """
    from shardwise.platforms.job_of_run import state_of_job

    run_dir = find_run(run, LAUNCHED)
    shown: list[str] = []
    is_live = True
    while is_live:
        # Asked first, so that the last lines are shown too.
        _, job = state_of_job(run_dir)
        is_live = job.state in ("waiting", "running")
        shown = _show_news(shown, list(_all_lines(run_dir)))
        if is_live:
            time.sleep(_LOOK_EVERY_S)
    typer.echo(f"the job has ended: {job.words}", err=True)


def _show_news(before: list[str], now: list[str]) -> list[str]:
    """Print the lines that are new. A line may come late and stand between older ones."""
    known = set(before)
    for line in now:
        if line not in known:
            typer.echo(line)
    return now


def _all_lines(run_dir: Path) -> Iterator[str]:
    """The ranks' lines, or the platform's own where no rank has a log yet."""
    from shardwise.metrics.read_events import read_events
    from shardwise.platforms.known import find_launcher
    from shardwise.platforms.rank_logs import merged_lines, newest_attempt
    from shardwise.platforms.submission import find_submission

    attempt, submission = newest_attempt(run_dir), find_submission(run_dir)
    record = run_dir / "events.jsonl"
    if attempt is not None:
        for line in merged_lines(attempt, read_events(record) if record.exists() else []):
            yield str(line)
    elif submission is not None:
        for output in find_launcher(submission.platform).logs(submission):
            yield from output.text.splitlines()
