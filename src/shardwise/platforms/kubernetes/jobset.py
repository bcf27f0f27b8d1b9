"""A JobSet that Kueue admits. API: jobset.x-k8s.io/v1alpha2 of JobSet 0.10 and later, whose rules
may look at messages of failed jobs; Kueue 0.17 and later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ExitCode, UserError
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
    topology_annotations,
)

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# JobSet makes a new Job at each start, so its id is that of the start.
ATTEMPT_FIELD = "metadata.labels['batch.kubernetes.io/controller-uid']"
_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def build_jobset(job: Job) -> dict[str, Any]:
    """The JobSet of a run."""
    name, settings = kube_name(job.name), job.config.kubernetes
    if settings.queue is None:
        raise UserError(
            "a JobSet needs kubernetes.queue",
            why="without a queue pods start one by one, and two jobs that each hold half of the "
            "GPUs wait for each other for ever",
            fix="write kubernetes.queue=NAME with a LocalQueue of Kueue: kubectl get localqueues "
            f"-n {settings.namespace}; or take --on volcano, whose scheduler starts pods together",
        )
    counts = [nnodes(job), f"--nproc-per-node={job.ranks_per_node}"]
    made = container(
        job,
        image=settings.image,
        command=agent_words(job, f"{name}-{NODE}-0-0.{name}:{PORT}", counts),
        env=environment(job, ATTEMPT_FIELD, PET_NODE_RANK=_INDEX_FIELD),
        ports=[{"containerPort": PORT}],
        resources=resources(job),
    )
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {
                **labels(job),
                QUEUE_LABEL: Because(settings.queue, queue_reason(job)),
            },
            **job_annotations(job),
        },
        "spec": jobset_spec(job, made),
    }


def queue_reason(job: Job) -> str:
    """Why a job has a queue of Kueue."""
    return (
        f"Kueue starts all {job.nodes} pods together or none, so two jobs never hold half of the "
        "GPUs each."
    )


def jobset_spec(
    job: Job, made: Mapping[str, Any], job_labels: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The rules of restarts and the one Job, also in the runtime of a TrainJob."""
    template: dict[str, Any] = {"spec": _job_spec(job, made)}
    if job_labels:
        template = {"metadata": {"labels": dict(job_labels)}, **template}
    return {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": Because(
                True, "Agents meet before any pod is ready, so their names must be known earlier."
            ),
        },
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _failure_policy(job: Job) -> dict[str, Any]:
    final = "|".join(str(int(code)) for code in FINAL_CODES)
    return {
        "maxRestarts": Because(
            job.launch.max_requeues,
            "launch.max_requeues: restarts after a pod died. Each resumes from the newest "
            "checkpoint.",
        ),
        "restartStrategy": Because(
            "BlockingRecreate",
            "No new pod starts before the old ones are gone: two starts would write one run "
            "directory.",
        ),
        "rules": [
            Because(
                {
                    "name": "final",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [f"exit code ({final}) "],
                },
                "A wrong setting, a model that does not fit, a failed check or a loss that is no "
                "number would end the same way again.",
            ),
            Because(
                {
                    "name": "saved",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                },
                "A run that was preempted, or met its time limit, has saved, and goes on as often "
                "as it takes.",
            ),
        ],
    }


def _job_spec(job: Job, made: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": Because(job.nodes, "One pod for each node of the plan."),
        "completions": job.nodes,
        "backoffLimit": Because(
            0, "A single pod is never replaced: the others would wait for it in a dead rendezvous."
        ),
        "podFailurePolicy": {
            "rules": [
                _fail_on(sorted(int(code) for code in FINAL_CODES)),
                _fail_on([int(ExitCode.PREEMPTED)]),
                Because(
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    "Eviction, preemption and a drained node end the Job with a reason that the "
                    "rules of the JobSet can tell from a crash.",
                ),
            ]
        },
    }
    if job.walltime_s.value is not None:
        spec["activeDeadlineSeconds"] = Because(
            math.ceil(job.walltime_s.value),
            f"{job.walltime_s.why}. After it the run saves, and a restart goes on; waiting in a "
            "queue does not count.",
        )
    if job.is_elastic:
        spec["successPolicy"] = Because(
            {"rules": [{"succeededIndexes": "0"}]},
            "The agents meet in the first pod, which ends with the run. Pods that never got a node "
            "would keep the Job open. Kubernetes 1.31 and later.",
        )
    topology = topology_annotations(job.config.kubernetes)
    metadata: dict[str, Any] = {"labels": labels(job)}
    if topology:
        metadata["annotations"] = topology
    spec["template"] = {"metadata": metadata, "spec": pod_spec(job, made)}
    return spec


def _fail_on(codes: list[int]) -> dict[str, Any]:
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": NODE, "operator": "In", "values": codes},
    }
