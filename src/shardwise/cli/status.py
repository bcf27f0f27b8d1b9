"""`shardwise status`: how a run goes, wherever it was started."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.find_run import TRACES, find_run
from shardwise.units import format_duration

if TYPE_CHECKING:
    from shardwise.platforms.launcher import JobState
    from shardwise.platforms.submission import Submission
    from shardwise.report.collect import RunRecord

LAUNCHED = (*TRACES, "launch/submission.json")
Run = Annotated[Path, typer.Argument(help="A run directory, or its name under ./runs.")]
# The steps that the time to go is told from.
_RECENT = 5


def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the state of a run: its job, its step, the time to go, and which node is late.

    \b
    Examples:
      shardwise status runs/demo
      shardwise status demo --json
    Next: shardwise logs RUN, shardwise attach RUN or shardwise stop RUN
    """
    from shardwise.platforms.job_of_run import state_of_job
    from shardwise.report.collect import collect_run

    run_dir = find_run(run, LAUNCHED)
    submission, job = state_of_job(run_dir)
    record = collect_run(run_dir)
    found = _facts(record, submission, job)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for line in _lines(found):
        typer.echo(line)


def _facts(record: RunRecord, submission: Submission | None, job: JobState) -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    step = record.steps[-1]["step"] if record.steps else 0
    saved = [entry.step for entry in record.checkpoints if entry.checkpoint is not None]
    is_live = job.state in ("waiting", "running")
    return {
        "run": record.name,
        "platform": None if submission is None else submission.platform,
        "job": None if submission is None else submission.id,
        "state": job.state,
        "words": job.words,
        "nodes": list(job.nodes),
        "record": _record(record, is_live=is_live),
        "step": step,
        "num_steps": record.num_steps,
        "eta_s": _eta_s(record) if is_live else None,
        "checkpoint": max(saved, default=None),
        "late": late_rank(record) if is_live else None,
    }


def _record(record: RunRecord, *, is_live: bool) -> str:
    """What the run itself has left. Only its platform knows whether it lives."""
    from shardwise.report.collect import state_of

    times = record.times()
    said = state_of(record, time.time())
    if not times or not said.startswith("running or dead"):
        return said
    ago = f"its last event was {format_duration(time.time() - times[-1])} ago"
    return ago if is_live else f"it has left no word of its end; {ago}"


def _eta_s(record: RunRecord) -> float | None:
    recent = [event["step_s"] for event in record.steady[-_RECENT:] if "step_s" in event]
    if not recent or record.num_steps is None:
        return None
    return (record.num_steps - int(record.steps[-1]["step"])) * statistics.median(recent)


def late_rank(record: RunRecord) -> dict[str, Any] | None:
    """The rank that the others wait for now, and the node that it is on."""
    from shardwise.platforms.rank_logs import newest_attempt, nodes_of_ranks
    from shardwise.report.late import stretches_of

    reports, stretches = record.history("collectives"), stretches_of(record)
    if not stretches or stretches[-1]["last_step"] != reports[-1]["step"]:
        return None
    late, attempt = stretches[-1], newest_attempt(record.path)
    node = None if attempt is None else nodes_of_ranks(attempt).get(late["rank"])
    since = late["step"]
    count = sum(report["step"] >= since for report in reports)
    behind = {"since_step": since, "behind_s": late["behind_s"], "reports": count}
    return {"rank": late["rank"], "node": node} | behind


def _lines(found: dict[str, Any]) -> Iterator[str]:
    job = f"{found['platform']} job {found['job']}: " if found["platform"] else ""
    nodes = f" on {', '.join(found['nodes'])}" if found["nodes"] else ""
    yield f"{found['run']}: {found['state']} ({job}{found['words']}){nodes}"
    total = found["num_steps"]
    of = f" of {total} ({found['step'] / total:.1%})" if total else ""
    eta = "" if found["eta_s"] is None else f", eta {format_duration(found['eta_s'])}"
    yield f"  step {found['step']}{of}{eta}; {found['record']}"
    if found["checkpoint"] is not None:
        yield f"  newest checkpoint: step {found['checkpoint']}"
    if (late := found["late"]) is not None:
        where = f" on {late['node']}" if late["node"] else ""
        yield (
            f"  late: the others wait up to {1e3 * late['behind_s']:.0f} ms per step for rank "
            f"{late['rank']}{where}, since step {late['since_step']}"
        )
