"""A run as a platform sees it: how many nodes, for how long, and with what environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from shardwise.config.plain import dump_yaml
from shardwise.config.schema import LaunchConfig, RunConfig
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import ClusterSpec
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.platforms.foresight import choose_grace, choose_shm, choose_walltime

FOLDER = "launch"
CONFIG_NAME = "run.yaml"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a platform's file, and the reason for its value."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launcher makes its files from. Every choice is the plan's or the user's."""

    name: str
    run_dir: Path
    work_dir: Path
    """Where the command was typed: relative paths of the configuration begin there."""

    files_dir: Path
    """Where the files are written."""

    command: str
    """What starts shardwise on a node, as words of a shell."""

    config: RunConfig
    """What the ranks are given. A later change of the user's file does not reach a job that waits
    or is started again."""

    cluster: ClusterSpec
    least_nodes: int
    """The fewest nodes that the run may go on with; `cluster.num_nodes` unless it is elastic."""

    walltime_s: Choice[float | None]
    """None leaves the limit to the platform."""

    grace_s: Choice[int]
    """What the run gets to save before it is killed."""

    shm_bytes: Choice[int]
    environment: tuple[Setting, ...]

    @property
    def launch(self) -> LaunchConfig:
        """What the user said about launching."""
        return self.config.launch

    @property
    def nodes(self) -> int:
        """The nodes that it is planned for."""
        return self.cluster.num_nodes

    @property
    def is_elastic(self) -> bool:
        """Whether it may go on with fewer nodes."""
        return self.least_nodes < self.nodes

    @property
    def nnodes(self) -> str:
        """The number of nodes as torchrun reads it."""
        return f"{self.least_nodes}:{self.nodes}" if self.is_elastic else str(self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """One for each device."""
        return self.cluster.devices_per_node

    @property
    def device_kind(self) -> str:
        """The devices as the name of a cluster spells them."""
        return "CPU" if self.cluster.gpu is None else self.cluster.gpu.name

    @property
    def config_path(self) -> Path:
        """The file that the ranks read."""
        return self.files_dir / CONFIG_NAME

    @property
    def config_text(self) -> str:
        """Its content: every setting, so that no default of a later version changes it."""
        return dump_yaml(self.config)


def build_job(plan: Plan, *, command: str, least_nodes: int, files_dir: Path | None = None) -> Job:
    """The job of a plan, started from the current directory. `command` is the path of this
    installation's own."""
    config = _pinned(plan)
    said = config.launch.command
    run_dir = Path(config.runs_dir) / config.name
    return Job(
        name=config.name,
        run_dir=run_dir,
        work_dir=Path.cwd(),
        files_dir=run_dir / FOLDER if files_dir is None else files_dir.absolute(),
        command=quote(command) if said == "auto" else said,
        config=config,
        cluster=plan.cluster,
        least_nodes=least_nodes,
        walltime_s=choose_walltime(plan),
        grace_s=choose_grace(plan),
        shm_bytes=choose_shm(plan),
        environment=_environment(plan.cluster, config.launch.environment),
    )


def _pinned(plan: Plan) -> RunConfig:
    """The configuration with what must stay the same wherever and on however many nodes it runs."""
    config = replace(plan.config, runs_dir=os.path.abspath(plan.config.runs_dir))
    if not config.launch.elastic:
        return config
    train = replace(config.train, global_batch=plan.decided.global_batch)
    return replace(config, train=train)


def _environment(cluster: ClusterSpec, said: Mapping[str, int | str]) -> tuple[Setting, ...]:
    """The variables of the ranks: ours, and the user's in place of them."""
    own = [
        Setting(
            "PYTHONUNBUFFERED", "1", "a line is in the log when it is printed, not minutes later"
        )
    ]
    if cluster.device == "cuda":
        own.append(
            Setting(*ALLOCATOR, "expandable segments fragment less, so less memory is reserved")
        )
        own.append(
            Setting(
                "NCCL_DEBUG", "WARN", "NCCL names the cause of a failed collective in a rank's log"
            )
        )
    if cluster.device == "cuda" and cluster.num_nodes > 1:
        own.append(
            Setting(
                "NCCL_IB_TIMEOUT",
                "22",
                "a link that is away for seconds is waited for (4.096 us x 2^22, retried); it is "
                "read on InfiniBand and RoCE only",
            )
        )
    given = [Setting(name, str(value), "given: launch.environment") for name, value in said.items()]
    return (*(one for one in own if one.name not in said), *given)
