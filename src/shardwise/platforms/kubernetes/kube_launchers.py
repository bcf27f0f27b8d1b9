"""Kubernetes as three platforms: Kubeflow's TrainJob, a JobSet with Kueue, and a Volcano Job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.plain import dump_yaml
from shardwise.errors import ExitCode, UserError, brief
from shardwise.files import replace_file
from shardwise.platforms.explained import to_yaml
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes.client import (
    CONFIG_MAP,
    JOB_SET,
    RUNTIME,
    TRAIN_JOB,
    VOLCANO_JOB,
    Kind,
    KubernetesCluster,
    PodSeen,
    kind_of,
)
from shardwise.platforms.kubernetes.jobset import build_jobset
from shardwise.platforms.kubernetes.pods import config_map
from shardwise.platforms.kubernetes.states import state_of
from shardwise.platforms.kubernetes.suits import validate_suits
from shardwise.platforms.kubernetes.trainjob import build_trainjob
from shardwise.platforms.kubernetes.volcano import build_volcano
from shardwise.platforms.launcher import JobState, Output, Rendered
from shardwise.platforms.rendered import explained_file
from shardwise.platforms.submission import Submission
from shardwise.platforms.volume import runs_dir_on_volume

_FILE = "manifest.yaml"
_CONFIG_FILE = "config-map.yaml"
_GONE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesLauncher:
    """One kind of job. All of them have the same pods."""

    name: str
    about: str
    kind: Kind
    build: Callable[[Job], Sequence[Mapping[str, Any]]]
    """The manifests of a job, what others need first."""

    name_label: str
    """The label with which the controller marks the pods of a job."""

    index_label: str

    def render(self, job: Job) -> Rendered:
        """The job with a reason above each setting, and the configuration of its ranks."""
        validate_suits(job, self.name)
        runs_dir = runs_dir_on_volume(job, job.config.kubernetes.mount)
        config = replace(job.config, runs_dir=str(runs_dir))
        main = explained_file(job, _FILE, *self.build(job))
        given = explained_file(job, _CONFIG_FILE, config_map(job, dump_yaml(config)))
        return Rendered(files=(main, given))

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Create the objects. Those of an earlier job of this name, which has ended, go first."""
        settings = job.config.kubernetes
        cluster = KubernetesCluster(settings.namespace, settings.context)
        manifests = _read([file.text for file in rendered.files])
        name = manifests[-1]["metadata"]["name"]
        self._make_room(cluster, name)
        self._create(cluster, manifests)
        at = f"@{settings.context}" if settings.context else ""
        return f"{settings.namespace}/{name}{at}"

    def status(self, submission: Submission) -> JobState:
        """What the controller says, and what the scheduler says about pods that wait."""
        cluster, name = _place(submission)
        found = cluster.read(self.kind, name)
        if found is None:
            words = f"no {self.kind.name} {name} is left: it was stopped or removed"
            return JobState(state="stopped", words=words)
        return self._state(cluster, found)

    def logs(self, submission: Submission) -> Sequence[Output]:
        """What each pod has printed: the agent, and the first rank of its node."""
        cluster, name = _place(submission)
        pods = self._pods(cluster, name)
        return [
            Output(
                name=f"pod {one.name} on {one.node or 'no node yet'}", text=cluster.log(one.name)
            )
            for one in pods
        ]

    def stop(self, submission: Submission) -> None:
        """Delete the job: its pods get SIGTERM, save and end."""
        cluster, name = _place(submission)
        cluster.delete(self.kind, name)
        self._delete_companions(cluster, name)

    def exclude(self, submission: Submission, nodes: Sequence[str]) -> None:
        """Stop the job, and create it again without these nodes; a pod template cannot change."""
        cluster, name = _place(submission)
        manifests = _written_without(Path(submission.files_dir), name, nodes)
        self._clear(cluster, name)
        self._create(cluster, manifests)
        replace_file(Path(submission.files_dir, _FILE), to_yaml(*manifests[1:]).encode())

    def _pods(self, cluster: KubernetesCluster, name: str) -> list[PodSeen]:
        return cluster.pods(f"{self.name_label}={name}", self.index_label)

    def _state(self, cluster: KubernetesCluster, found: Mapping[str, Any]) -> JobState:
        return state_of(found, self._pods(cluster, found["metadata"]["name"]))

    def _make_room(self, cluster: KubernetesCluster, name: str) -> None:
        found = cluster.read(self.kind, name)
        state = None if found is None else self._state(cluster, found)
        if state is not None and state.state not in ("ended", "failed"):
            raise UserError(
                f"{self.kind.name} {cluster.namespace}/{name} is there already: {state.words}",
                why="two jobs cannot write to one run directory",
                fix=f"kubectl delete {self.kind.plural}.{self.kind.group} {name} -n "
                f"{cluster.namespace}; or give this run another name: name=NAME-2",
                code=ExitCode.ENVIRONMENT,
            )
        self._clear(cluster, name)

    def _create(self, cluster: KubernetesCluster, manifests: Sequence[Mapping[str, Any]]) -> None:
        """All of them or none."""
        made: list[Mapping[str, Any]] = []
        try:
            for manifest in manifests:
                cluster.create(manifest)
                made.append(manifest)
        except UserError:
            for manifest in reversed(made):
                cluster.delete(kind_of(manifest), manifest["metadata"]["name"])
            raise

    def _delete_companions(self, cluster: KubernetesCluster, name: str) -> None:
        cluster.delete(CONFIG_MAP, f"{name}-config")
        if self.kind is TRAIN_JOB:
            cluster.delete(RUNTIME, name)

    def _clear(self, cluster: KubernetesCluster, name: str) -> None:
        """Delete a job and what goes with it, and wait until a new one can be created."""
        cluster.delete(self.kind, name)
        cluster.wait_until_gone(self.kind, name, _GONE_S)
        self._delete_companions(cluster, name)
        if self.kind is TRAIN_JOB:
            # Trainer 2.2 keeps a runtime until no TrainJob uses it.
            cluster.wait_until_gone(RUNTIME, name, _GONE_S)


def _read(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The manifests in the order of their creation: the job comes last."""
    return [manifest for text in reversed(texts) for manifest in yaml.safe_load_all(text)]


def _written_without(folder: Path, name: str, nodes: Sequence[str]) -> list[dict[str, Any]]:
    """The manifests that a launch has written, without these nodes."""
    try:
        texts = [(folder / file).read_text(encoding="utf-8") for file in (_FILE, _CONFIG_FILE)]
        manifests = _read(texts)
        kinds = [kind_of(manifest) for manifest in manifests]
        if kinds[0] is not CONFIG_MAP or manifests[-1]["metadata"]["name"] != name:
            raise ValueError(f"they are not those of the job {name}")
        for spec in _pod_specs(manifests):
            _leave_out(spec, nodes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{folder} does not hold the files of this job any more",
            why=brief(error),
            fix="write them anew: shardwise launch FILE --on PLATFORM",
            code=ExitCode.VERIFY_FAILED,
        ) from error
    return manifests


def _place(submission: Submission) -> tuple[KubernetesCluster, str]:
    """`namespace/name`, or `namespace/name@context`."""
    place, _, context = submission.id.partition("@")
    namespace, _, name = place.partition("/")
    return KubernetesCluster(namespace, context or None), name


def _pod_specs(data: Any) -> list[dict[str, Any]]:
    """Every pod spec in manifests, wherever it stands."""
    if isinstance(data, list):
        return [spec for item in data for spec in _pod_specs(item)]
    if not isinstance(data, dict):
        return []
    if "containers" in data:
        return [data]
    return [spec for value in data.values() for spec in _pod_specs(value)]


def _leave_out(spec: dict[str, Any], nodes: Sequence[str]) -> None:
    """Add nodes to those that a pod spec leaves out."""
    from shardwise.platforms.kubernetes.pods import without_nodes

    before: list[str] = []
    if "affinity" in spec:
        rules = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        before = rules["nodeSelectorTerms"][0]["matchExpressions"][0]["values"]
    spec["affinity"] = {"nodeAffinity": without_nodes([*before, *nodes])}


_JOBSET_LABELS = {
    "name_label": "jobset.sigs.k8s.io/jobset-name",
    "index_label": "batch.kubernetes.io/job-completion-index",
}
KUBERNETES = (
    KubernetesLauncher(
        name="trainjob",
        about="Kubernetes with Kubeflow Trainer 2.2 or later",
        kind=TRAIN_JOB,
        build=build_trainjob,
        **_JOBSET_LABELS,
    ),
    KubernetesLauncher(
        name="jobset",
        about="Kubernetes with JobSet and Kueue",
        kind=JOB_SET,
        build=lambda job: [build_jobset(job)],
        **_JOBSET_LABELS,
    ),
    KubernetesLauncher(
        name="volcano",
        about="Kubernetes with Volcano",
        kind=VOLCANO_JOB,
        build=lambda job: [build_volcano(job)],
        name_label="volcano.sh/job-name",
        index_label="volcano.sh/task-index",
    ),
)
