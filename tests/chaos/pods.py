"""Pods of a rendered job as processes of this machine, with what Kubernetes and an operator give
them: fields, variables, mounts, and an address in place of the names that only a cluster knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from launched import Started

from commands import SHARDWISE

_VARIABLE = re.compile(r"\$\((\w+)\)")
# What Trainer puts at the end of a container's variables, and refuses in a TrainJob.
_TRAINER_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class Pods:
    """All pods of one start of a job."""

    container: Mapping[str, Any]
    mounts: Mapping[str, Path]
    count: int
    names: str
    """How pods are called by their peers, as a pattern."""

    fields: Mapping[str, str]

    def start(
        self, port: int, folder: Path, environ: Mapping[str, str], count: int | None = None
    ) -> list[Started]:
        """The last pod first: the others may come later than the one that hosts the meeting. Only
        the first `count` of them get a node, where it is given."""
        folder.mkdir()
        return [
            self._start(index, port, folder / f"pod-{index}.txt", environ)
            for index in reversed(range(count or self.count))
        ][::-1]

    def _start(self, index: int, port: int, output: Path, environ: Mapping[str, str]) -> Started:
        variables = self._variables(index)
        command, *words = (expanded(word, variables) for word in self.container["command"])
        assert command == "shardwise", command
        # Pods of a cluster have names and mounts of their own; here they share one machine's.
        here = [re.sub(self.names, f"127.0.0.1:{port}", word) for word in words]
        here = [self._mounted(word) for word in here]
        return Started((SHARDWISE, *here), output, {**environ, **variables})

    def _variables(self, index: int) -> dict[str, str]:
        fields = {**self.fields, _INDEX: str(index)}
        fields["metadata.annotations['volcano.sh/task-index']"] = str(index)
        made = {"JOB_COMPLETION_INDEX": str(index)}
        for one in self.container["env"]:
            value = one.get("value")
            if value is None:
                value = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            made[one["name"]] = expanded(value, made)
        return made

    def _mounted(self, word: str) -> str:
        for place, folder in self.mounts.items():
            if word.startswith(f"{place}/"):
                return str(folder / word.removeprefix(f"{place}/"))
        return word


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does it: a name that there is not stays as it is."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)


def pods_of(on: str, files: Path, mounts: Path, attempt: int) -> Pods:
    """The pods that an operator makes of a job's files. Config maps are written below `mounts`."""
    job, *others = _manifests(files)
    name, spec = job["metadata"]["name"], job["spec"]
    uid = f"uid-{attempt}"
    fields = {
        "status.podIP": "127.0.0.1",
        "metadata.labels['batch.kubernetes.io/controller-uid']": uid,
        "metadata.annotations['scheduling.k8s.io/group-name']": f"{name}-one-uid",
        "metadata.annotations['volcano.sh/job-version']": str(attempt),
    }
    if on == "volcano":
        task = spec["tasks"][0]
        pod, count, names = task["template"]["spec"], task["replicas"], f"{name}-node-0.{name}"
        container = pod["containers"][0]
    else:
        runtime = next((one for one in others if one["kind"] == "TrainingRuntime"), None)
        sets = spec if runtime is None else runtime["spec"]["template"]["spec"]
        batch = sets["replicatedJobs"][0]["template"]["spec"]
        pod, count, names = (
            batch["template"]["spec"],
            batch["completions"],
            f"{name}-node-0-0.{name}",
        )
        container = pod["containers"][0]
        if runtime is not None:
            count = spec["trainer"]["numNodes"]
            container = {**container, **_with_trainer(spec["trainer"], names, count)}
    folders = _write_volumes(pod, container, others, mounts)
    return Pods(container, folders, count, rf"{re.escape(names)}:{_TRAINER_PORT}", fields)


def _manifests(files: Path) -> list[dict[str, Any]]:
    """The job first."""
    texts = [path.read_text() for path in sorted(files.glob("*.yaml"), reverse=True)]
    found = [one for text in texts for one in yaml.safe_load_all(text)]
    return sorted(found, key=lambda one: one["kind"] in ("ConfigMap", "TrainingRuntime"))


def _with_trainer(trainer: Mapping[str, Any], address: str, count: int) -> dict[str, Any]:
    """A TrainJob's own words in its runtime's container, and Trainer's variables after them."""
    added = {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(_TRAINER_PORT),
    }
    values = [{"name": name, "value": value} for name, value in added.items()]
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    return {"command": trainer["command"], "env": [*trainer["env"], *values, rank]}


def _write_volumes(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    mounts: Path,
) -> dict[str, Path]:
    """A folder for each config map that the container mounts."""
    maps = {one["metadata"]["name"]: one["data"] for one in others if one["kind"] == "ConfigMap"}
    volumes = {one["name"]: one for one in pod["volumes"]}
    made = {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            folder = mounts / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in maps[volume["configMap"]["name"]].items():
                (folder / name).write_text(text)
            made[mount["mountPath"]] = folder
    return made


def what_follows(on: str, files: Path, code: int) -> str:
    """What the operator does when a container has ended with this code, by the job's own rules."""
    job, *others = _manifests(files)
    spec = job["spec"]
    if on == "volcano":
        given = {one["exitCode"]: one["action"] for one in spec["policies"] if "exitCode" in one}
        events = [one["action"] for one in spec["policies"] if "PodFailed" in one.get("events", [])]
        return str(given.get(code, events[0]))
    runtime = next((one for one in others if one["kind"] == "TrainingRuntime"), None)
    sets = spec if runtime is None else runtime["spec"]["template"]["spec"]
    rules = sets["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    matching = [code in one.get("onExitCodes", {}).get("values", []) for one in rules]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if True in matching:
        place = matching.index(True)
        reason = "PodFailurePolicy"
        message = (
            f"Container node for pod default/first-node-0-1-abcde failed with exit code {code} "
            f"matching {rules[place]['action']} rule at index {place}"
        )
    for rule in sets["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(one, message) for one in patterns
        ):
            return str(rule["action"])
    return "RestartJobSet"
