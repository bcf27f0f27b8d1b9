"""What disks, network file systems and object stores say."""

from __future__ import annotations

from shardwise.doctor.check import Check
from shardwise.doctor.signatures.log import Logs, sign

STORAGE: tuple[Check[Logs], ...] = (
    sign(
        "SW660", "error", "The disk is full",
        r"No space left on device",
        "Checkpoints, caches or logs filled it. A full /dev/shm says the same.",
        "make room; lower checkpoint.keep; df -h and df -i show which disk it is",
    ),
    sign(
        "SW661", "error", "The quota of the disk is used up",
        r"Disk quota exceeded",
        "The user or project may store no more there.",
        "remove old runs, or choose another place with runs_dir=DIRECTORY",
    ),
    sign(
        "SW662", "error", "The file system cannot be written to",
        r"Read-only file system",
        "It is mounted read-only, or the kernel made it so after an error.",
        "look for disk errors in `dmesg`; choose another place with runs_dir=DIRECTORY",
    ),
    sign(
        "SW663", "error", "A file on NFS has gone",
        r"Stale (?:NFS )?file handle",
        "Another host removed or replaced it, or the export has changed.",
        "start again; keep run directories out of what others clean up",
    ),
    sign(
        "SW664", "error", "A disk cannot be read or written",
        r"Input/output error",
        "The disk, its server or the network to it failed.",
        "look for disk errors in `dmesg`; shardwise checkpoint verify RUN",
    ),
    sign(
        "SW665", "error", "A file may not be accessed",
        r"(?:\[Errno 13\] |PermissionError: )[^\n]*Permission denied",
        "The user of the job is not the owner, or the volume has another group.",
        "check its permissions; in Kubernetes securityContext.fsGroup",
    ),
    sign(
        "SW666", "error", "A safetensors file is cut or damaged",
        r"(?:SafetensorError|InvalidHeaderDeserialization|MetadataIncompleteBuffer)",
        "A download or a save was interrupted.",
        "fetch the file anew; shardwise checkpoint verify RUN",
    ),
    sign(
        "SW667", "error", "A torch.save file is cut or damaged",
        r"PytorchStreamReader failed",
        "A download or a save was interrupted.",
        "fetch or save the file anew",
    ),
    sign(
        "SW668", "warning", "The object store slows requests down",
        r"(?:SlowDown|Please reduce your request rate)",
        "Too many ranks read or write the same prefix at once.",
        "copy the data to local disks first",
    ),
    sign(
        "SW669", "error", "There are no credentials for the object store",
        r"(?:Unable to locate credentials|NoCredentialsError|InvalidAccessKeyId)",
        "The job does not have the keys that the login node has.",
        "give the job a role or a secret",
    ),
    sign(
        "SW670", "warning", "The hub limits requests",
        r"(?:429 Client Error|Too Many Requests)",
        "Every rank asks the hub at once.",
        "fetch once: hf download MODEL; then HF_HUB_OFFLINE=1",
    ),
    sign(
        "SW671", "error", "A FUSE mount has died",
        r"Transport endpoint is not connected",
        "The process behind the mount ended, often for memory.",
        "mount it anew; give its process more memory",
    ),
    sign(
        "SW672", "warning", "Lustre lost a server",
        r"Lustre(?:Error)?: [^\n]*(?:was lost|timed out|was evicted)",
        "Reads and writes wait until it is back.",
        "tell the administrators; the run goes on when the server does",
    ),
    sign(
        "SW673", "warning", "An NFS server does not answer",
        r"nfs: server \S+ not responding",
        "All ranks that read from it wait.",
        "copy the data to local disks; look at the server's load",
    ),
    sign(
        "SW674", "error", "The file system has no locks",
        r"No locks available",
        "NFS without lockd, or a mount with nolock.",
        "choose another place with runs_dir=DIRECTORY, or start lockd",
    ),
    sign(
        "SW675", "error", "The machine is offline, or a name cannot be resolved",
        r"(?:Temporary failure in name resolution|Name or service not known|"
        r"LocalEntryNotFoundError|OfflineModeIsEnabled)",
        "Compute nodes often have no way to the internet.",
        "fetch model and data on the login node, into a cache that nodes share (HF_HOME)",
    ),
)  # fmt: skip
