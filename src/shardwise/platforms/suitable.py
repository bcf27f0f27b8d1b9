"""Whether a job suits a platform: what several of them ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.errors import UserError
from shardwise.platforms.job import Job

_IS_SAID: Mapping[str, Callable[[Job], bool]] = {
    "launch.options": lambda job: bool(job.launch.options),
    "launch.exclude": lambda job: bool(job.launch.exclude),
    "launch.walltime_s": lambda job: job.launch.walltime_s != "auto",
    "launch.grace_s": lambda job: job.launch.grace_s != "auto",
    "launch.elastic": lambda job: job.launch.elastic,
}


def validate_other_nodes(job: Job, nodes: str) -> None:
    """Raise where the plan is for the machine of this command, and the platform has other nodes."""
    if job.cluster.source == "probed":
        raise UserError(
            f"cluster.name={job.config.cluster.name} is the machine that this command runs on",
            why=f"{nodes} are others, and the plan must know what they have",
            fix="write cluster.name=NODESxGPUSxKIND, such as cluster.name=4x8xH100",
        )


def validate_of_use(job: Job, place: str, *settings: str, why: str, besides: str = "") -> None:
    """Raise where the user gave one of these settings, which have no use there."""
    if unused := [name for name in settings if _IS_SAID[name](job)]:
        listed = " and ".join(unused)
        raise UserError(
            f"{listed} would have no effect on {place}",
            why=why,
            fix=f"leave {listed} out{besides}",
        )
