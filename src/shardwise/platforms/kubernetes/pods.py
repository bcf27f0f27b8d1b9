"""The pod of one node: what all three platforms give their controllers to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import split
from typing import Any

from shardwise.config.schema import KubernetesConfig
from shardwise.errors import ExitCode
from shardwise.platforms.explained import Because, plain
from shardwise.platforms.job import Job
from shardwise.platforms.kubernetes.kube_names import kube_name

# Trainer asks for this name of the replicated job and of its container.
NODE = "node"
CONFIG_DIR = "/etc/shardwise"
CONFIG_FILE = "run.yaml"
# torchrun's own default, and the port that Trainer names to torchrun.
PORT = 29500
# Pods of one start may be minutes apart: one node has the image, another pulls it.
MEETING_S = 1800
# How long the pods that have a node wait for others before they go on with fewer. A pod that comes
# later joins by a restart, which takes longer than this.
_LAST_CALL_S = 120
# The end of the agent after its ranks have ended.
AGENT_S = 30
# After these a restart would end the same way.
FINAL_CODES = (
    ExitCode.CONFIG,
    ExitCode.DOES_NOT_FIT,
    ExitCode.VERIFY_FAILED,
    ExitCode.DIVERGED,
)
_ATTEMPT = "SHARDWISE_ATTEMPT"
_POD_IP = "SHARDWISE_POD_IP"
# Of a job that may go on with fewer nodes: the fewest.
LEAST_NODES = "shardwise/least-nodes"


def config_map_name(job: Job) -> str:
    """The ConfigMap that holds the configuration of a run."""
    return f"{kube_name(job.name)}-config"


def labels(job: Job) -> dict[str, str]:
    """How everything of a run is found again."""
    return {
        "app.kubernetes.io/name": "shardwise",
        "app.kubernetes.io/instance": kube_name(job.name),
    }


def config_map(job: Job, text: str) -> dict[str, Any]:
    """The configuration, which every pod mounts."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config_map_name(job),
            "namespace": job.config.kubernetes.namespace,
            "labels": labels(job),
        },
        "data": Because(
            {CONFIG_FILE: text},
            "What the ranks read. A later change of the file on your machine does not reach a job "
            "that waits or is started again.",
        ),
    }


def agent_words(job: Job, endpoint: str, counts: Sequence[Any]) -> list[Any]:
    """The command of one pod: one agent, which starts a rank for each device."""
    said = job.launch.command
    words = [
        # The path of this installation means nothing in the image.
        *(["shardwise"] if said == "auto" else split(said)),
        "torchrun",
        *counts,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        Because(
            f"--rdzv-id=$({_ATTEMPT})",
            "A pod of an earlier start that is not yet gone cannot join this one.",
        ),
        _meeting(job),
        Because(f"--local-addr=$({_POD_IP})", "Ranks meet by address, before DNS knows the names."),
        Because(
            f"--shutdown-timeout={job.grace_s.value}",
            f"After SIGTERM ranks get this long to save ({job.grace_s.why}).",
        ),
        f"{CONFIG_DIR}/{CONFIG_FILE}",
    ]
    if not job.launch.setup:
        return words
    # `exec` leaves the agent in the shell's place, so that SIGTERM reaches it.
    lines = [_literal(line) for line in job.launch.setup]
    script = "\n".join(["set -e", *lines, 'exec "$@"'])
    return ["/bin/sh", "-c", script, "sh", *words]


def _meeting(job: Job) -> Because:
    timing = f"--rdzv-conf=join_timeout={MEETING_S},read_timeout={MEETING_S}"
    why = (
        "Pods of one start may be minutes apart, where one node has the image and another pulls it."
    )
    if not job.is_elastic:
        return Because(timing, why)
    more = (
        f"With launch.elastic those that are there go on after {_LAST_CALL_S} s; a pod that comes "
        "later joins them, and the plan is made anew."
    )
    return Because(f"{timing},last_call_timeout={_LAST_CALL_S}", f"{why} {more}")


def nnodes(job: Job) -> Any:
    """The option of torchrun for the number of pods."""
    option = f"--nnodes={job.nnodes}"
    if not job.is_elastic:
        return option
    return Because(option, "launch.elastic: with fewer pods each trains on more of a batch.")


def job_annotations(job: Job) -> dict[str, Any]:
    """What `shardwise status` reads of a job."""
    if not job.is_elastic:
        return {}
    why = f"With launch.elastic the run goes on with down to {job.least_nodes} of {job.nodes} pods."
    return {"annotations": {LEAST_NODES: Because(str(job.least_nodes), why)}}


def environment(job: Job, attempt: Mapping[str, str] | str, **own: str) -> list[dict[str, Any]]:
    """The variables of a pod. `attempt` and `own` name fields of the pod itself."""
    parts = {_ATTEMPT: attempt} if isinstance(attempt, str) else dict(attempt)
    fields = {**parts, **own, _POD_IP: "status.podIP"}
    entries: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    if not isinstance(attempt, str):
        joined = "-".join(f"$({name})" for name in attempt)
        entries.append({"name": _ATTEMPT, "value": joined})
    entries += [
        {"name": one.name, "value": Because(_literal(one.value), one.why)}
        for one in job.environment
    ]
    return entries


def _literal(text: str) -> str:
    """Text of the user's in which Kubernetes finds no variable: it reads `$(NAME)` and `$$`."""
    return text.replace("$", "$$")


def resources(job: Job) -> dict[str, Any]:
    """What one pod asks for."""
    settings = job.config.kubernetes
    wanted: dict[str, Any] = {name: str(value) for name, value in settings.resources.items()}
    if job.cluster.device == "cuda":
        why = f"One rank for each GPU: the plan is for {job.ranks_per_node} on a node."
        wanted = {"nvidia.com/gpu": Because(str(job.ranks_per_node), why), **wanted}
    elif "cpu" not in wanted:
        wanted["cpu"] = Because(str(job.ranks_per_node), "One core at least for each rank.")
    why = "Requests are the limits, so that a node which runs out of memory evicts others first."
    return {"requests": Because(wanted, why), "limits": plain(wanted)}


def container(job: Job, **more: Any) -> dict[str, Any]:
    """The one container of a pod. `more` is what a platform keeps here, and not elsewhere."""
    settings = job.config.kubernetes
    made: dict[str, Any] = {
        "name": NODE,
        **more,
        "workingDir": Because(
            settings.mount, "Relative paths of the configuration lie in the shared volume."
        ),
        "volumeMounts": [
            {"name": "shared", "mountPath": settings.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        ],
    }
    if settings.secret:
        made["envFrom"] = [{"secretRef": {"name": settings.secret}}]
    if any("rdma" in name or "hca" in name or "efa" in name for name in settings.resources):
        made["securityContext"] = {
            "capabilities": {
                "add": Because(["IPC_LOCK"], "RDMA pins memory, for which NCCL must lock pages.")
            }
        }
    return made


def pod_spec(job: Job, made: Mapping[str, Any]) -> dict[str, Any]:
    """The pod around a container."""
    settings = job.config.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": Because(
            "Never",
            "One pod that is started again would meet nobody: all start again together, and resume "
            "from the newest checkpoint.",
        ),
        "terminationGracePeriodSeconds": Because(
            job.grace_s.value + AGENT_S,
            f"SIGTERM saves. Ranks get {job.grace_s.value} s for it, the agent {AGENT_S} s more; "
            "Kubernetes' own 30 s would kill them before. A preStop would only take of this time.",
        ),
        "shareProcessNamespace": Because(
            True,
            "The first process of a container does not die of SIGTERM before it handles it. "
            "Here another process is the first, so a job that still waits for nodes ends at once.",
        ),
        "enableServiceLinks": Because(
            False, "A variable for each Service of the namespace is of no use to ranks."
        ),
        "containers": [made],
        "volumes": _volumes(job),
    }
    if affinity := _affinity(job):
        spec["affinity"] = affinity
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerate:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.tolerate]
    if settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    return spec


def _volumes(job: Job) -> list[dict[str, Any]]:
    shm = job.shm_bytes
    return [
        {
            "name": "shared",
            "persistentVolumeClaim": {
                "claimName": Because(
                    job.config.kubernetes.claim,
                    "All pods write one run directory, so the claim must be ReadWriteMany.",
                )
            },
        },
        {
            "name": "shm",
            "emptyDir": {
                "medium": Because("Memory", f"{shm.why}. It counts as the pod's memory."),
                "sizeLimit": f"{-(-shm.value // 2**20)}Mi",
            },
        },
        {"name": "config", "configMap": {"name": config_map_name(job)}},
    ]


def _affinity(job: Job) -> dict[str, Any]:
    """Keeps pods from the nodes that are left out."""
    if not job.launch.exclude:
        return {}
    return {"nodeAffinity": Because(without_nodes(job.launch.exclude), "given: launch.exclude")}


def without_nodes(names: Sequence[str]) -> dict[str, Any]:
    """An affinity for every node but these."""
    left_out = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(set(names))}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [left_out]}]
        }
    }


def topology_annotations(settings: KubernetesConfig) -> dict[str, Any]:
    """What Kueue reads on a pod template."""
    if settings.topology is None:
        return {}
    kind = "required" if settings.topology_required else "preferred"
    why = "Collectives between nodes cross fewer switches where all pods share one of these."
    return {f"kueue.x-k8s.io/podset-{kind}-topology": Because(str(settings.topology), why)}
