"""Whether a job suits Kubernetes."""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.platforms.job import Job
from shardwise.platforms.suitable import validate_of_use, validate_other_nodes
from shardwise.platforms.volume import runs_dir_on_volume


def validate_suits(job: Job, on: str) -> None:
    """Raise where something is missing, or was said that Kubernetes has no use for."""
    settings = job.config.kubernetes
    validate_other_nodes(job, "the nodes of Kubernetes")
    needed = {
        "kubernetes.image": ("REGISTRY/IMAGE:TAG", "pods start from an image", settings.image),
        "kubernetes.claim": (
            "CLAIM",
            "all pods write one run directory, on a ReadWriteMany volume",
            settings.claim,
        ),
    }
    for name, (example, why, value) in needed.items():
        if value is None:
            raise UserError(f"{name} is not set", why=why, fix=f"write {name}={example}")
    validate_of_use(
        job,
        "Kubernetes",
        "launch.options",
        why="they are options of a batch command; a manifest has none",
        besides="; `shardwise config schema` lists section `kubernetes`",
    )
    if job.launch.elastic and on != "volcano":
        _validate_elastic(job)
    runs_dir_on_volume(job, settings.mount)


def _validate_elastic(job: Job) -> None:
    """Raise where pods get nodes together or not at all, so that a job never gets fewer."""
    settings = job.config.kubernetes
    if settings.queue is None:
        raise UserError(
            "launch.elastic needs kubernetes.queue",
            why="without it Trainer makes a PodGroup of all pods, which get nodes together or not "
            "at all",
            fix="write kubernetes.queue=NAME with a LocalQueue of Kueue, or take --on volcano",
        )
    if settings.topology is not None:
        raise UserError(
            "launch.elastic and kubernetes.topology do not go together with Kueue",
            why="with a topology Kueue looks for places of all pods before it admits a job",
            fix="leave one of them out, or take --on volcano",
        )
