"""What Kubernetes says: events, pod states and its clients."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

KUBERNETES: tuple[Check[Logs], ...] = (
    sign(
        "SW630", "error", "A container was killed for its memory",
        r"OOMKilled",
        "It used more than its limit; pages of /dev/shm count too.",
        "raise resources.limits.memory; use fewer data.workers",
    ),
    sign(
        "SW631", "error", "There are not enough free GPUs",
        r"Insufficient (?:nvidia\.com/gpu|amd\.com/gpu|vpc\.amazonaws\.com/efa|rdma/\S+)",
        "The scheduler finds no node with what the pod asks for.",
        "wait, or ask for fewer; use gang scheduling so that no part of a job waits alone",
    ),
    sign(
        "SW632", "error", "The image cannot be pulled",
        r"(?:ImagePullBackOff|ErrImagePull)",
        "Its name is wrong, or the registry wants a secret.",
        "check the image's name and imagePullSecrets",
    ),
    sign(
        "SW633", "error", "The container ends again and again",
        r"CrashLoopBackOff",
        "The first failure is in the log of the previous container.",
        "kubectl logs POD --previous",
        follows=True,
    ),
    sign(
        "SW634", "error", "A pod was evicted",
        r"The node was low on resource",
        "The node's disk or memory ran low.",
        "set requests for ephemeral-storage; write runs to a volume",
    ),
    sign(
        "SW635", "error", "A volume cannot be mounted",
        r"(?:MountVolume\.\w+ failed|FailedMount)",
        "The claim, the secret or the server of the volume is not there.",
        "kubectl describe pvc; check the storage class and the node's drivers",
    ),
    sign(
        "SW636", "error", "A volume is used by another node",
        r"Multi-Attach error for volume",
        "A ReadWriteOnce volume can be on one node only.",
        "use a ReadWriteMany volume for the run directory",
    ),
    sign(
        "SW637", "error", "No node tolerates the pod",
        r"had untolerated taint",
        "GPU nodes are often tainted.",
        "add the toleration of the nodes, such as nvidia.com/gpu",
    ),
    sign(
        "SW638", "warning", "A pod was preempted",
        r"(?:Preempted (?:by|in order to)|reason: Preempt)",
        "A workload of higher priority took its place.",
        "let the job restart: the same command resumes from the newest checkpoint",
    ),
    sign(
        "SW639", "error", "The job has no restarts left",
        r"BackoffLimitExceeded",
        "Its pods failed more often than allowed.",
        "read the log of the first pod that failed",
        follows=True,
    ),
    sign(
        "SW640", "error", "The job reached its deadline",
        r"(?:DeadlineExceeded|was active on the node longer than the specified deadline)",
        "activeDeadlineSeconds is over.",
        "raise it; the same command resumes from the newest checkpoint",
    ),
    sign(
        "SW641", "warning", "The gang is not complete",
        r"pod group is not ready",
        "Volcano waits until all pods of the job have a place.",
        "free nodes, or lower minAvailable and the number of nodes together",
    ),
    sign(
        "SW642", "error", "The service account may not do this",
        r'is forbidden: User "',
        "A role is missing.",
        "ask for a Role with the verb and resource that the line names",
    ),
    sign(
        "SW643", "error", "The quota of the namespace is used up",
        r"exceeded quota",
        "The namespace may use no more.",
        "kubectl describe resourcequota; ask for less, or for a larger quota",
    ),
    sign(
        "SW644", "error", "A node is not ready",
        r"NodeNotReady",
        "The kubelet of the node does not answer.",
        "kubectl describe node; let the job restart elsewhere",
    ),
    sign(
        "SW645", "error", "The container runtime cannot use the GPU",
        r"nvidia-container-cli: [^\n]*error",
        "The driver is not loaded on the node, or the toolkit has another version.",
        "run nvidia-smi on the node; install the NVIDIA container toolkit anew",
    ),
)  # fmt: skip
