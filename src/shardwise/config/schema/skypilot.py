"""Where a run takes place on SkyPilot."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilotConfig:
    """What `shardwise launch --on skypilot` writes into a task."""

    infra: str | None = None
    """Where SkyPilot may look for nodes, such as `k8s`, `k8s/CONTEXT` or `aws/us-east-1`; unset:
    wherever it has access."""

    volume: str | None = None
    """A volume of `sky volumes ls` that all nodes may write. It holds the run directory, data and
    models. Unset: `skypilot.setup` mounts a file system that all nodes share."""

    mount: str = "/shared"
    """Where nodes see the volume. Ranks start there, so relative paths of this file lie in it."""

    accelerator: str | None = None
    """SkyPilot's name of the GPU where it has several, such as H100-MEGA; unset: that of
    `cluster.name`."""

    spot: bool = False
    """Take spot instances. A run that was preempted goes on from its newest checkpoint."""

    image: str | None = None
    """The image of the nodes, such as `docker:registry.example.com/shardwise:1`."""

    setup: list[str] = field(default_factory=list)
    """Lines of shell that prepare a new node once, such as [pip install /shared/shardwise]."""

    file_mounts: dict[str, str] = field(default_factory=dict)
    """What SkyPilot copies to each node, such as {/data: s3://bucket/data}."""

    secrets: list[str] = field(default_factory=list)
    """Variables of this shell that the ranks need and no file may show, such as [HF_TOKEN]."""
