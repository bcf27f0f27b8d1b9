"""SkyPilot: a managed job, submitted, watched and stopped through the `sky` command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.config.plain import dump_yaml
from shardwise.errors import ExitCode, UserError
from shardwise.platforms.clients import run_client
from shardwise.platforms.job import Job
from shardwise.platforms.launcher import JobState, Output, Rendered, State
from shardwise.platforms.rendered import config_file, explained_file
from shardwise.platforms.sky_task import build_task
from shardwise.platforms.submission import Submission
from shardwise.platforms.suitable import validate_of_use, validate_other_nodes
from shardwise.platforms.volume import runs_dir_on_volume

_FILE = "task.yaml"
_STATES: Mapping[str, State] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING"), "waiting"),
    **dict.fromkeys(("RUNNING", "RECOVERING", "WINDING_DOWN", "CANCELLING"), "running"),
    "SUCCEEDED": "ended",
    "CANCELLED": "stopped",
}
_NUMBER = re.compile(r"Managed Job ID: *(?:\x1b\[[0-9;]*m)*([0-9]+)")
# The first command starts SkyPilot's server, and uploads the files.
_SUBMIT_S = 1800.0
_LAST_LINES = 1000


class SkyPilotLauncher:
    """A managed job: SkyPilot finds the nodes, and others when they are lost."""

    name = "skypilot"
    about = "a managed job of SkyPilot, on clouds or Kubernetes"

    def render(self, job: Job) -> Rendered:
        """The task, and the configuration that SkyPilot copies to the nodes."""
        _validate_suits(job)
        runs_dir = runs_dir_on_volume(job, job.config.skypilot.mount)
        text = dump_yaml(replace(job.config, runs_dir=str(runs_dir)))
        main = explained_file(job, _FILE, build_task(job))
        return Rendered(files=(main, config_file(job, text)))

    def submit(self, job: Job, rendered: Rendered) -> str:
        """`sky jobs launch`, which answers with the number of the job."""
        secrets = [word for name in job.config.skypilot.secrets for word in ("--secret", name)]
        words = ["launch", "--yes", "--detach-run", *secrets, str(rendered.main.path)]
        said = _sky(*words, timeout_s=_SUBMIT_S)
        found = _NUMBER.search(said)
        if found is None:
            raise UserError(
                "SkyPilot does not say which job it has made",
                why=" ".join(said.split())[-300:],
                fix="sky jobs queue shows it; sky jobs cancel NUMBER ends it",
                code=ExitCode.ENVIRONMENT,
            )
        return found[1]

    def status(self, submission: Submission) -> JobState:
        """What `sky jobs queue` says."""
        said = _sky("queue", "--all", "--output", "json")
        for found in _records(said):
            if str(found.get("job_id")) == submission.id:
                return _state(found)
        return JobState(state="unknown", words=f"SkyPilot has no managed job {submission.id}")

    def logs(self, submission: Submission) -> Sequence[Output]:
        """What the nodes have printed."""
        text = _sky("logs", "--no-follow", f"--tail={_LAST_LINES}", submission.id)
        return [Output(name=f"SkyPilot job {submission.id}", text=text)]

    def stop(self, submission: Submission) -> None:
        """Cancel it. The hook of the task lets the ranks save before the nodes are given back."""
        _sky("cancel", "--yes", submission.id)

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """SkyPilot takes any node that fits."""
        raise UserError(
            f"{', '.join(nodes)} cannot be left out of a job on SkyPilot",
            why="SkyPilot asks for nodes by what they have, and knows no names of them",
            fix="keep pods from it on Kubernetes: `kubectl cordon NODE`, then submit the run again",
        )


def _state(found: Mapping[str, Any]) -> JobState:
    said = str(found.get("status"))
    more = [
        f"recovered {found['recovery_count']} times" if found.get("recovery_count") else "",
        " ".join(str(found.get("failure_reason") or "").split()),
    ]
    words = "; ".join(filter(None, [said, *more]))
    return JobState(state=_STATES.get(said, "failed"), words=words)


def _records(said: str) -> list[dict[str, Any]]:
    """The list in what the command prints; notes of the client may stand before it."""
    start = re.search(r"^\[", said, re.MULTILINE)
    try:
        found = json.loads(said[start.start() :]) if start else None
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UserError(
            "`sky jobs queue --output json` does not print a list of jobs",
            why=" ".join(said.split())[-300:],
            fix="pip install 'skypilot>=0.14'",
            code=ExitCode.ENVIRONMENT,
        )
    return found


def _sky(*words: str, timeout_s: float = 300.0) -> str:
    return run_client(
        ["sky", "jobs", *words],
        platform="SkyPilot",
        get="pip install 'skypilot[kubernetes]>=0.14', or with the name of your cloud in the "
        "brackets, then: sky check",
        timeout_s=timeout_s,
    )


def _validate_suits(job: Job) -> None:
    """Raise where something is missing, or was said that SkyPilot has no use for."""
    validate_other_nodes(job, "the nodes of SkyPilot")
    settings = job.config.skypilot
    if settings.volume is None and not settings.setup:
        raise UserError(
            "skypilot.volume is not set",
            why="all nodes write one run directory, and a recovery on other nodes has to find it. "
            "A bucket is none: its files cannot be renamed in one step, nor locked",
            fix="write skypilot.volume=NAME (sky volumes ls), or mount a shared file system in "
            "skypilot.setup",
        )
    validate_of_use(
        job,
        "SkyPilot",
        *("launch.options", "launch.exclude", "launch.walltime_s", "launch.elastic"),
        why="a managed job has no time limit and no names of nodes, and gets all nodes or none",
        besides="; section `skypilot` says where it runs",
    )
