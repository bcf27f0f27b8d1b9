"""A Volcano Job. API: batch.volcano.sh/v1alpha1 of Volcano 1.9 and later. A tier of HyperNodes
needs 1.12 by its number, 1.14 by its name, and 1.15 by a name with a slash."""

from __future__ import annotations

import math
from typing import Any

from shardwise.errors import ExitCode
from shardwise.platforms.explained import Because
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes.kube_names import kube_name
from shardwise.platforms.kubernetes.pods import (
    FINAL_CODES,
    NODE,
    PORT,
    agent_words,
    container,
    environment,
    job_annotations,
    labels,
    nnodes,
    pod_spec,
    resources,
)

# Volcano counts preemptions and crashes alike, and a run may be preempted many times.
_PREEMPTIONS = 100
# The id of the job is in the name of its group; the version grows with each restart.
_ATTEMPT_FIELDS = {
    "SHARDWISE_GROUP": "metadata.annotations['scheduling.k8s.io/group-name']",
    "SHARDWISE_VERSION": "metadata.annotations['volcano.sh/job-version']",
}
_INDEX_FIELD = "metadata.annotations['volcano.sh/task-index']"


def build_volcano(job: Job) -> dict[str, Any]:
    """The Volcano Job of a run."""
    name, settings = kube_name(job.name), job.config.kubernetes
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        "minAvailable": Because(job.least_nodes, _gang(job)),
        **_success(job),
        "maxRetry": Because(
            job.launch.max_requeues + _PREEMPTIONS,
            f"launch.max_requeues, and {_PREEMPTIONS} more for preemptions, which Volcano counts "
            "too.",
        ),
        "plugins": {
            "svc": Because(
                ["--publish-not-ready-addresses=true"],
                "Pods reach each other by name before they are ready. The pytorch plugin is left "
                "out: its RANK and WORLD_SIZE count pods, not ranks.",
            )
        },
        "policies": _policies(),
        "tasks": [_task(job, name)],
    }
    if settings.queue is not None:
        spec["queue"] = settings.queue
    if settings.topology is not None:
        spec["networkTopology"] = _topology(settings.topology, settings.topology_required)
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": labels(job),
            **job_annotations(job),
        },
        "spec": spec,
    }


def _gang(job: Job) -> str:
    if job.is_elastic:
        return (
            f"With launch.elastic the run starts with {job.least_nodes} of {job.nodes} pods; "
            "Volcano places the first pods first."
        )
    return "All pods start together or none: with fewer, two jobs could hold half of the GPUs each."


def _success(job: Job) -> dict[str, Any]:
    """When the job has ended."""
    if not job.is_elastic:
        return {}
    why = "Pods end together when the run does. Those that never got a node would keep it open."
    return {"minSuccess": Because(job.least_nodes, why)}


def _policies() -> list[Any]:
    """The first policy that matches is taken."""
    final = [{"exitCode": int(code), "action": "TerminateJob"} for code in sorted(FINAL_CODES)]
    why = "After a wrong setting, a model that does not fit or a failed check a restart is no help."
    again: list[Any] = [
        Because(
            {"exitCode": int(ExitCode.PREEMPTED), "action": "RestartJob"},
            "A preempted run has saved, and resumes.",
        ),
        Because(
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"},
            "One pod alone would meet nobody: all start again, and resume from the newest "
            "checkpoint.",
        ),
    ]
    return [Because(final[0], why), *final[1:], *again]


def _task(job: Job, name: str) -> dict[str, Any]:
    counts = [nnodes(job), f"--nproc-per-node={job.ranks_per_node}"]
    made = container(
        job,
        image=job.config.kubernetes.image,
        command=agent_words(job, f"{name}-{NODE}-0.{name}:{PORT}", counts),
        env=environment(job, _ATTEMPT_FIELDS, PET_NODE_RANK=_INDEX_FIELD),
        ports=[{"containerPort": PORT}],
        resources=resources(job),
    )
    spec = pod_spec(job, made)
    if job.walltime_s.value is not None:
        spec["activeDeadlineSeconds"] = Because(
            math.ceil(job.walltime_s.value),
            f"{job.walltime_s.why}. After it the run saves, and a restart goes on.",
        )
    return {
        "name": NODE,
        "replicas": Because(job.nodes, "One pod for each node of the plan."),
        "minAvailable": job.least_nodes,
        "template": {"metadata": {"labels": labels(job)}, "spec": spec},
    }


def _topology(tier: int | str, required: bool) -> dict[str, Any]:
    why = "Collectives between nodes cross fewer switches below this tier of HyperNodes."
    highest = {"highestTierAllowed": tier} if isinstance(tier, int) else {"highestTierName": tier}
    return {"mode": Because("hard" if required else "soft", why), **highest}
