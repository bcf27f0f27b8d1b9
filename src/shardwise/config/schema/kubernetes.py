"""Where a run takes place on Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """What `shardwise launch --on trainjob`, `jobset` and `volcano` write into manifests."""

    image: str | None = None
    """The container image. It needs shardwise on its PATH."""

    claim: str | None = None
    """A PersistentVolumeClaim that all nodes may write (ReadWriteMany). It holds the run directory,
    data and models."""

    mount: str = "/shared"
    """Where pods see the claim. Ranks start there, so relative paths of this file lie in it."""

    namespace: str = "default"
    """The namespace of the job, the claim and the queue."""

    context: str | None = None
    """The context of the kubeconfig; unset: the current one."""

    queue: str | None = None
    """A LocalQueue of Kueue, which starts all pods together or none; with Volcano, its queue."""

    topology: int | str | None = None
    """What the pods should share: a node label such as `cloud.provider.com/topology-rack`, or with
    Volcano a tier of its HyperNodes, by number or name."""

    topology_required: bool = False
    """Wait until the pods can share it; otherwise it is only preferred."""

    resources: dict[str, int | str] = field(default_factory=dict)
    """What a pod gets besides GPUs, such as {cpu: 96, memory: 900Gi, rdma/hca: 8}."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have."""

    tolerate: list[str] = field(default_factory=list)
    """Keys of taints that pods may ignore, such as [nvidia.com/gpu]."""

    secret: str | None = None
    """A Secret whose entries become variables of the ranks, such as HF_TOKEN."""

    pull_secret: str | None = None
    """A Secret for the image's registry."""

    service_account: str | None = None
    """The ServiceAccount of the pods; unset: the namespace's own."""
