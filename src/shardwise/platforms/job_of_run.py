"""The job behind a run directory: submitted by `shardwise launch`, or started by hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shardwise.errors import ExitCode, UserError
from shardwise.lease.holder_record import FOLDER, newest_record, this_kernel
from shardwise.lease.holders import lock_holders
from shardwise.platforms.known import find_launcher
from shardwise.platforms.launcher import JobState
from shardwise.platforms.submission import Submission, find_submission


def state_of_job(run_dir: Path) -> tuple[Submission | None, JobState]:
    """What the platform says, or, for a run that was started by hand, whether its process lives."""
    submission = find_submission(run_dir)
    if submission is not None:
        return submission, find_launcher(submission.platform).status(submission)
    return None, state_of_process(run_dir)


def stop_job(run_dir: Path) -> JobState:
    """Ask the run to save and to end. Returns what it was asked in."""
    submission, found = state_of_job(run_dir)
    if found.state not in ("waiting", "running"):
        return found
    if submission is not None:
        find_launcher(submission.platform).stop(submission)
        return found
    record = newest_record(run_dir)
    if record is None or record.kernel != this_kernel():
        raise UserError(
            f"{run_dir} was not submitted by `shardwise launch`, and runs on another machine",
            why=f"{found.words}; a signal reaches processes of this machine only",
            fix=f"type it there: shardwise stop {run_dir}",
            code=ExitCode.ENVIRONMENT,
        )
    os.kill(record.pid, signal.SIGTERM)
    return found


def exclude_nodes(run_dir: Path, nodes: list[str]) -> Submission:
    """Keep nodes out of the next start of a submitted run."""
    submission = find_submission(run_dir)
    if submission is None:
        raise UserError(
            f"{run_dir} was not submitted by `shardwise launch`",
            why="a scheduler chooses the nodes of a run, and this one has none",
            fix="shardwise launch FILE --on slurm --submit",
        )
    find_launcher(submission.platform).exclude(submission, nodes)
    return submission


def state_of_process(run_dir: Path) -> JobState:
    """Whether the process that started a run by hand lives."""
    record = newest_record(run_dir)
    if record is None or record.released:
        return JobState(state="ended", words="no process holds the run directory")
    words = f"process {record.pid} on {record.host}"
    if record.kernel != this_kernel():
        return JobState(state="unknown", words=f"{words} held it last", nodes=(record.host,))
    if lock_holders(run_dir / FOLDER / "held"):
        return JobState(state="running", words=words, nodes=(record.host,))
    return JobState(state="ended", words=f"{words} has ended")
