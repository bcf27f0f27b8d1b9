"""A TrainJob and the runtime that it names. API: trainer.kubeflow.org/v1alpha1 of Kubeflow Trainer
2.2 and later, where `runtimePatches` took the place of `podTemplateOverrides`."""

from __future__ import annotations

from typing import Any

from shardwise.platforms.explained import Because
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes.jobset import (
    ATTEMPT_FIELD,
    QUEUE_LABEL,
    jobset_spec,
    queue_reason,
)
from shardwise.platforms.kubernetes.kube_names import kube_name
from shardwise.platforms.kubernetes.pods import (
    agent_words,
    container,
    environment,
    job_annotations,
    labels,
    nnodes,
    resources,
)

_API = "trainer.kubeflow.org/v1alpha1"
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
# As long as MEETING_S: the pods that have a node hold it while the others wait for theirs.
_SCHEDULE_S = 1800


def build_trainjob(job: Job) -> list[dict[str, Any]]:
    """The runtime, which holds the rules of restarts, and the TrainJob."""
    return [_runtime(job), _trainjob(job)]


def _runtime(job: Job) -> dict[str, Any]:
    settings = job.config.kubernetes
    made = container(job, image=settings.image)
    spec: dict[str, Any] = {
        "mlPolicy": {
            "numNodes": job.nodes,
            "torch": Because(
                {}, "Trainer gives torchrun its variables (PET_NNODES, PET_NODE_RANK and others)."
            ),
        }
    }
    if settings.queue is None:
        spec["podGroupPolicy"] = Because(
            {"coscheduling": {"scheduleTimeoutSeconds": _SCHEDULE_S}},
            f"All {job.nodes} pods get nodes together or none does: Trainer makes a PodGroup with "
            "minMember = numNodes, which needs the coscheduling plugin in the scheduler. With "
            "kubernetes.queue Kueue does it instead.",
        )
    spec["template"] = {
        "spec": Because(
            jobset_spec(job, made, _ANCESTOR),
            "A TrainJob cannot say how to restart; its runtime can. So this run has its own.",
        )
    }
    return {"apiVersion": _API, "kind": "TrainingRuntime", "metadata": _metadata(job), "spec": spec}


def _trainjob(job: Job) -> dict[str, Any]:
    settings, metadata = job.config.kubernetes, _metadata(job)
    if settings.queue is not None:
        metadata["labels"] = {
            **metadata["labels"],
            QUEUE_LABEL: Because(settings.queue, queue_reason(job)),
        }
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {
                "name": kube_name(job.name),
                "apiGroup": "trainer.kubeflow.org",
                "kind": Because("TrainingRuntime", "Unset it would be a ClusterTrainingRuntime."),
            },
            "trainer": {
                "image": settings.image,
                "command": agent_words(
                    job,
                    "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
                    # Otherwise Trainer's PET_NNODES says it.
                    [nnodes(job)] if job.is_elastic else [],
                ),
                "env": environment(job, ATTEMPT_FIELD),
                "numNodes": Because(job.nodes, "As many as the plan has."),
                "numProcPerNode": Because(
                    job.ranks_per_node,
                    "Unset, a pod without GPUs would start a rank for each core.",
                ),
                "resourcesPerNode": resources(job),
            },
        },
    }


def _metadata(job: Job) -> dict[str, Any]:
    return {
        "name": kube_name(job.name),
        "namespace": job.config.kubernetes.namespace,
        "labels": labels(job),
        **job_annotations(job),
    }
