"""What a run keeps, must meet and shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.config.schema.words import Auto


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When state is kept, and whether a run goes on from it."""

    every: int = 500
    """Steps between checkpoints; 0: only at the end."""

    keep: int = 3
    """How many are kept; the oldest go first."""

    keep_best: bool | Auto = "auto"
    """Save after each evaluation that has the lowest held-out loss so far, and keep the newest of
    these saves beside the `keep` newest. `auto`: where `train.patience` is set."""

    at_end: bool = True
    """Save after the last step."""

    asynchronous: bool = True
    """Write in the background while training goes on; the loop only waits for the copy to host
    memory, which takes as many bytes as the shards of a rank."""

    verify: bool = True
    """Hash every file before it is loaded. A damaged checkpoint is quarantined, and the run goes on
    from the one before it."""

    wait_for_room_s: float = 600.0
    """A save that finds the disk full fails, and training goes on. The next save, or the last one
    of the run, waits this long for room; then the run stops with an error. 0: it does not wait."""

    resume: bool = True
    """Go on from the newest checkpoint in the run directory. `false` refuses to start over one."""

    begin_anew: bool = False
    """Begin at step 1 where the run directory has checkpoints and none of them is good. Otherwise
    such a run stops and names them. They are set aside, and none is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatesConfig:
    """What a run must meet. It is judged at its end, and by `shardwise verify`."""

    enforce: bool = False
    """`shardwise train` exits with 5 where a gate failed at the end of a run, as `verify` does."""

    min_mfu: float = 0.40
    """The least MFU, on devices whose peak is known."""

    max_memory: float = 0.95
    """The most of a device's memory that may be reserved."""

    step_spread: float = 0.05
    """How far step times may be from their median, either way."""

    grad_spike: float = 10.0
    """How many times its median the gradient norm may reach."""

    max_exposed: float = 0.15
    """The most of a step that communication may take while nothing computes, in profiled steps.
    Above it the links set the pace: a larger micro-batch or another mesh gains more than tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What is printed and recorded."""

    log_every: int = 10
    """Steps between lines on the console and step events in events.jsonl."""

    collectives: bool = True
    """Time every collective, and name the rank that the others wait for."""

    profile: int | None = None
    """The first step to profile, on every rank: RUN/profile holds the traces, and `shardwise
    profile RUN` reads them. Unset: none. The step before it warms the profiler up."""

    profile_steps: int = 3
    """How many steps are profiled, one after the other."""

    memory_history: bool = False
    """Record the stack of every allocation of GPU memory, so that an out-of-memory error leaves a
    snapshot for pytorch.org/memory_viz. Recording takes time at each allocation, so it is meant for
    debugging, not for long runs."""

    callbacks: list[str] = field(default_factory=list)
    """Functions of yours, as `module:function`, that the first rank calls with each logged step,
    evaluation and complete checkpoint. An exception in one ends the run."""

    tensorboard: bool = False
    """Write the curves of events.jsonl to RUN/tensorboard too."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Send the curves to Weights & Biases, or keep them in RUN/wandb for `wandb sync`. Needs
    `pip install shardwise[wandb]`."""

    wandb_project: str = "shardwise"
    """The W&B project that the run belongs to."""

    prometheus_port: int | None = None
    """Serve GET /metrics on this port, from the first rank of every node; unset: not at all."""

    prometheus_host: str = "127.0.0.1"
    """The address that the endpoint listens on. Loopback can be reached from this machine only;
    0.0.0.0 from all of its networks. The endpoint has no password."""
