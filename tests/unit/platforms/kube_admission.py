"""What CEL rules and webhooks of Kubernetes, JobSet, Trainer and Volcano refuse on creation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kube_schemas import DNS_LABEL

# RFC 1035: unlike other labels it begins with a letter.
_LABEL_1035 = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_RESERVED = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}
Store = Mapping[tuple[str, str], Mapping[str, Any]]
"""Objects by kind and name, for those that name others."""


def pod_faults(spec: Mapping[str, Any]) -> Iterator[str]:
    volumes = {one["name"] for one in spec.get("volumes", [])}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"volumeMounts: {mount['name']}: Not found"
        resources = container.get("resources", {})
        for name, amount in resources.get("requests", {}).items():
            limit = resources.get("limits", {}).get(name)
            # Extended resources cannot be overcommitted.
            if "/" in name and limit != amount:
                yield f"resources.limits: {name}: must be equal to the request"
        yield from _variable_faults(container)


def _variable_faults(container: Mapping[str, Any]) -> Iterator[str]:
    """A reference to a variable that there is not stays as it is, in the command."""
    known = {one["name"] for one in container.get("env", [])}
    for word in container.get("command", []):
        for name in re.findall(r"(?<!\$)\$\(([A-Z_]+)\)", word):
            if name not in known and not name.startswith("PET_"):
                yield f"command: $({name}) is no variable of the container"


def job_faults(spec: Mapping[str, Any]) -> Iterator[str]:
    """batch/v1."""
    policy, pod = spec.get("podFailurePolicy"), spec["template"]["spec"]
    if policy and pod.get("restartPolicy") != "Never":
        yield "podFailurePolicy: restartPolicy must be Never"
    names = {one["name"] for one in pod["containers"]}
    for rule in (policy or {}).get("rules", []):
        codes = rule.get("onExitCodes", {})
        values = codes.get("values", [1])
        if values != sorted(set(values)):
            yield "onExitCodes.values: must be ordered and unique"
        if codes.get("containerName", next(iter(names))) not in names:
            yield f"onExitCodes.containerName: {codes['containerName']} is no container"
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        yield "completions: required when completionMode is Indexed"
    yield from pod_faults(pod)


def jobset_faults(name: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """The webhook of JobSet: names of jobs and pods are DNS labels."""
    for job in spec["replicatedJobs"]:
        template = job["template"]["spec"]
        last = template.get("completions", 1) - 1
        longest = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}-{last}-abcde"
        if not re.fullmatch(_LABEL_1035, longest):
            yield f"pod name {longest} is no DNS label of 63 characters"
        yield from job_faults(template)
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        for pattern in rule.get("onJobFailureMessagePatterns", []):
            re.compile(pattern)


def _of_jobset(manifest: Mapping[str, Any], store: Store) -> Iterator[str]:
    yield from jobset_faults(manifest["metadata"]["name"], manifest["spec"])


def _of_runtime(manifest: Mapping[str, Any], store: Store) -> Iterator[str]:
    """Trainer's webhook: the job that trains is called `node`, as is its container, once."""
    spec = manifest["spec"]["template"]["spec"]
    for job in spec["replicatedJobs"]:
        labels = job["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            names = {
                one["name"] for one in job["template"]["spec"]["template"]["spec"]["containers"]
            }
            if job.get("replicas", 1) != 1:
                yield "replicas: always must be 1"
            if "node" not in names:
                yield "containers: must have container with name node"
    yield from jobset_faults(manifest["metadata"]["name"], spec)


def _of_trainjob(manifest: Mapping[str, Any], store: Store) -> Iterator[str]:
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield "metadata.name must match RFC 1035 DNS label format"
    if len(name) > 63:
        yield "metadata.name must be no more than 63 characters"
    reference = spec["runtimeRef"]
    runtime = store.get((reference.get("kind", "ClusterTrainingRuntime"), reference["name"]))
    if runtime is None:
        yield f"runtimeRef: {reference['name']} not found: it must be created before the TrainJob"
        return
    trainer = spec.get("trainer", {})
    if reserved := _RESERVED & {one["name"] for one in trainer.get("env", [])}:
        yield f"must not have reserved envs, invalid envs configured: {sorted(reserved)}"
    yield from _variable_faults(trainer)


def _of_volcano(manifest: Mapping[str, Any], store: Store) -> Iterator[str]:
    """Volcano's webhook, and its policies for admission."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    total = sum(task.get("replicas", 1) for task in spec["tasks"])
    if spec.get("minAvailable", 0) > total:
        yield "job 'minAvailable' should not be greater than total replicas in tasks"
    events: list[str] = []
    codes: list[int] = []
    for policy in spec.get("policies", []):
        if ("events" in policy) == ("exitCode" in policy):
            yield "either event and exitCode should be specified"
        events += policy.get("events", [])
        codes += [policy["exitCode"]] if "exitCode" in policy else []
    if len(set(events)) != len(events) or ("*" in events and len(events) > 1):
        yield "duplicate event across different policy"
    if 0 in codes or len(set(codes)) != len(codes):
        yield "0 is not a valid error code, and each has one policy"
    topology = spec.get("networkTopology", {})
    if "highestTierAllowed" in topology and "highestTierName" in topology:
        yield "must not specify 'highestTierAllowed' and 'highestTierName' simultaneously"
    for task in spec["tasks"]:
        if task.get("minAvailable", 0) > task.get("replicas", 1):
            yield f"'minAvailable' is greater than 'replicas' in task: {task['name']}"
        if not re.fullmatch(DNS_LABEL, f"{name}-{task['name']}-{total - 1}"):
            yield "the name of a pod is no DNS label"
        yield from pod_faults(task["template"]["spec"])


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], Store], Iterator[str]]] = {
    "JobSet": _of_jobset,
    "TrainingRuntime": _of_runtime,
    "TrainJob": _of_trainjob,
    "Job": _of_volcano,
}


def admission_faults(manifest: Mapping[str, Any], store: Store) -> list[str]:
    """What is refused after the schema has been met."""
    check = _CHECKS.get(manifest["kind"])
    return [] if check is None else list(check(manifest, store))
