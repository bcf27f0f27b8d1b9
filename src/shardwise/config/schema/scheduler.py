"""How a run is handed to a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.config.schema.words import Auto


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What `shardwise launch` writes into the files of a platform."""

    walltime_s: float | Auto = "auto"
    """The time limit that the scheduler is asked for. `auto`: the plan's own forecast with a
    margin; where the plan has no speed, the scheduler's own limit."""

    grace_s: float | Auto = "auto"
    """Seconds that a run gets to save before it is killed. `auto`: one step, one checkpoint, and
    half a minute for the signal and the end of the processes."""

    elastic: bool = False
    """Go on with fewer nodes where the platform gives fewer, and with more when they come: the plan
    is made anew for them, with the same global batch and the same data order. Under torchrun it
    needs `--nnodes MIN:MAX`, and `train.global_batch`; `shardwise launch` writes both."""

    max_requeues: int = 3
    """How often a scheduler starts a run again after a node or a rank failed. Preemption and time
    limits are not counted: a run that has saved goes on."""

    exclude: list[str] = field(default_factory=list)
    """Nodes that the run must not get."""

    command: str | Auto = "auto"
    """What starts shardwise on the nodes, where it is not at the place that it has here, such as
    `/opt/env/bin/shardwise` or `apptainer exec image.sif shardwise`."""

    setup: list[str] = field(default_factory=list)
    """Lines of shell that run before the ranks start, such as [module load cuda]."""

    environment: dict[str, int | str] = field(default_factory=dict)
    """Variables of the ranks, such as {NCCL_SOCKET_IFNAME: ib0, NCCL_IB_TIMEOUT: 22}. They replace
    those that `shardwise launch` writes by itself. Numbers that are not whole, and words such as
    true, need quotes, because YAML does not keep how they are spelled."""

    options: list[str] = field(default_factory=list)
    """Options of the scheduler as it spells them, such as [--partition=gpu, --account=me]. They
    replace those of the same name."""
