"""The platforms that there are."""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.platforms.kubernetes.kube_launchers import KUBERNETES
from shardwise.platforms.launcher import Launcher
from shardwise.platforms.local import LocalLauncher
from shardwise.platforms.ray import RayLauncher
from shardwise.platforms.sky_launcher import SkyPilotLauncher
from shardwise.platforms.slurm import SlurmLauncher

PLATFORMS: tuple[Launcher, ...] = (
    LocalLauncher(),
    SlurmLauncher(),
    *KUBERNETES,
    RayLauncher(),
    SkyPilotLauncher(),
)


def find_launcher(name: str) -> Launcher:
    """The platform of that name."""
    for platform in PLATFORMS:
        if platform.name == name:
            return platform
    known = ", or --on ".join(platform.name for platform in PLATFORMS)
    raise UserError(f"--on {name} is no platform that shardwise knows", fix=f"write --on {known}")
