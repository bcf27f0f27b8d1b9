"""Ray: a job whose driver is a TorchTrainer, submitted through Ray's own client.

Written for Ray 2.60, whose Train is the second version (`ray.train.v2`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from shlex import join, split
from typing import Any, TypeVar

from shardwise.errors import ExitCode, UserError, brief
from shardwise.platforms.explained import Because
from shardwise.platforms.job import Job
from shardwise.platforms.launcher import JobState, Output, Rendered, State
from shardwise.platforms.rendered import config_file, explained_file
from shardwise.platforms.submission import Submission
from shardwise.platforms.suitable import validate_of_use, validate_other_nodes

_FILE = "ray.yaml"
_STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "ended",
    "FAILED": "failed",
    "STOPPED": "stopped",
}
_Answer = TypeVar("_Answer")


class RayLauncher:
    """A submitted job of a Ray cluster. RAY_ADDRESS names the cluster, as for `ray job submit`."""

    name = "ray"
    about = "a job of a Ray cluster"

    def render(self, job: Job) -> Rendered:
        """What the driver reads, and the configuration of the ranks."""
        _validate_suits(job)
        return Rendered(files=(explained_file(job, _FILE, _settings(job)), config_file(job)))

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Submit the driver. Ray's head needs the files at the same path."""
        number = f"{job.name}-{uuid.uuid4().hex[:8]}"
        driver = join([*split(job.command), "ray-driver", str(rendered.main.path)])
        _ask(lambda client: client.submit_job(entrypoint=driver, submission_id=number))
        return number

    def status(self, submission: Submission) -> JobState:
        """What Ray says about the driver."""
        found = _ask(lambda client: client.get_job_info(submission.id))
        said = str(getattr(found.status, "value", found.status))
        message = " ".join((found.message or "").split())
        # A driver whose ranks were asked to save and to end has done what it should.
        has_saved = f"exit code {int(ExitCode.PREEMPTED)}" in message
        state = "stopped" if has_saved else _STATES.get(said, "unknown")
        return JobState(state=state, words=f"{said}: {message}".rstrip(": "))

    def logs(self, submission: Submission) -> Sequence[Output]:
        """What the driver has printed, and the agents through it."""
        text = _ask(lambda client: client.get_job_logs(submission.id))
        return [Output(name=f"Ray job {submission.id}", text=text)]

    def stop(self, submission: Submission) -> None:
        """Another job tells the driver. Ray itself would kill it after three seconds."""
        if self.status(submission).state == "waiting":
            _ask(lambda client: client.stop_job(submission.id))
            return
        info = _ask(lambda client: client.get_job_info(submission.id))
        number = f"{submission.id}-stop-{uuid.uuid4().hex[:8]}"
        asking = f"{info.entrypoint} --stop"
        _ask(lambda client: client.submit_job(entrypoint=asking, submission_id=number))

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """Ray chooses nodes by what they have, not by name."""
        raise UserError(
            f"{', '.join(nodes)} cannot be left out of a job on Ray",
            why="Ray places workers by resources, and knows no names of nodes",
            fix="take the node out of the cluster: ray stop, typed on it; then the same command "
            "again",
        )


def _settings(job: Job) -> dict[str, Any]:
    """What stands in the file, each setting with its reason."""
    agent = [
        *split(job.command),
        "torchrun",
        f"--shutdown-timeout={job.grace_s.value}",
        str(job.config_path),
    ]
    wanted: dict[str, Any] = {"CPU": Because(job.ranks_per_node, "One core at least for each rank")}
    if job.cluster.device == "cuda":
        wanted = {"GPU": Because(job.ranks_per_node, "One rank for each GPU of a node"), **wanted}
    return {
        "name": job.name,
        "nodes": Because(job.nodes, "One worker of Ray for each node of the plan"),
        "least_nodes": Because(job.least_nodes, _least_reason(job)),
        "ranks_per_node": job.ranks_per_node,
        "resources_per_node": wanted,
        "placement_strategy": Because(
            "STRICT_SPREAD" if job.nodes > 1 else "PACK",
            "Each worker has a node of its own, as the plan has it",
        ),
        "max_failures": Because(
            job.launch.max_requeues,
            "launch.max_requeues: restarts after a worker died. Ray's own default is none. Each "
            "resumes from the newest checkpoint, and preemptions are not counted",
        ),
        "storage_path": Because(
            str(job.files_dir / "ray"), "Ray keeps its own notes here; checkpoints are shardwise's"
        ),
        "work_dir": Because(str(job.work_dir), "Relative paths of the configuration begin here"),
        "command": Because(
            agent,
            f"The agent of one node. After SIGTERM ranks get {job.grace_s.value} s to save "
            f"({job.grace_s.why})",
        ),
        "environment": {one.name: Because(one.value, one.why) for one in job.environment},
        "setup": list(job.launch.setup),
    }


def _least_reason(job: Job) -> str:
    if job.is_elastic:
        return (
            "launch.elastic: Ray starts with the nodes that it has, down to so many, and looks for "
            "more once a minute. Each start is planned anew, with the same global batch"
        )
    return "Ray starts all workers or none"


def _validate_suits(job: Job) -> None:
    """Raise for what Ray has no use for."""
    validate_other_nodes(job, "the nodes of a Ray cluster")
    validate_of_use(
        job,
        "Ray",
        *("launch.options", "launch.exclude", "launch.walltime_s"),
        why="a Ray job has no time limit and knows no names of nodes",
    )


def _ask(question: Callable[[Any], _Answer]) -> _Answer:
    """One question to the cluster."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise UserError(
            "Ray is not installed",
            fix="pip install 'shardwise[ray]'",
            code=ExitCode.ENVIRONMENT,
        ) from error
    try:
        return question(JobSubmissionClient())
    except (ConnectionError, OSError, RuntimeError) as error:
        where = os.environ.get("RAY_ADDRESS")
        raise UserError(
            "no Ray cluster answers" if where is None else f"the Ray cluster {where} refuses",
            why=brief(error),
            fix="name the dashboard of the head node: export RAY_ADDRESS=http://HOST:8265",
            code=ExitCode.ENVIRONMENT,
        ) from error
